"""The text of a pipeline's stages, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.errors import InputError
from stagewright.export.megatron_layout import read_layout, write_layout

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=40)


@given(COUNTS)
def test_what_is_written_is_read(counts: list[int]) -> None:
    assert read_layout(write_layout(counts)) == tuple(counts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (
            "Ettt|(tt|)*29,L",
            (3, *[2] * 29, 0),
        ),  # the documentation's example, without its layer of multi-token prediction
        ("Et*3|(tt|)*29L", (3, *[2] * 29, 0)),
        ("E,(t*2|)*3,t L", (2, 2, 2, 1)),
        ("EL", (0,)),
    ],
)
def test_all_forms_of_the_grammar_are_read(text: str, counts: tuple[int, ...]) -> None:
    assert read_layout(text) == counts


@pytest.mark.parametrize(
    "text", ["", "tt|tL", "Ett|tt", "Ett(t|)*L", "Etx|L", "EtE|L", "Et*99999999999|L", "Et|m|L"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        read_layout(text)
