"""Tables in terminals of any width: nothing is broken inside a word, and nothing is lost."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stagewright.report.tables import Table, facts, table

HEADINGS = ("stage", "starts at", "saved for weight gradients", "micro-\nbatches", "took")
ROWS = [
    (0, "net.model.layers.0.input_layernorm:7", "196.7", "64 of 1", "1.2 ms"),
    (1, "what enters each layer is kept, and more", "8.12", "128 of 16", None),
]


def lines(built: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(built, crop=False)
    return [line.rstrip() for line in capture.get().splitlines()]


def words(text: str) -> Counter[str]:
    return Counter(text.replace("─", " ").split())


@pytest.mark.parametrize("width", [300, 120, 80, 60, 50, 40])
def test_a_table_keeps_to_its_width_and_its_words(width: int) -> None:
    shown = lines(table("A title", HEADINGS, ROWS, text=2), width)
    assert max(map(len, shown)) <= max(width, 44), (
        "as wide as the longest name beside the first column at most"
    )
    found = words("\n".join(shown))
    assert found >= words(
        "\n".join(str(cell) for row in (HEADINGS, *ROWS) for cell in row if cell is not None)
    )


def test_a_table_takes_the_room_that_there_is() -> None:
    built = table("", HEADINGS, ROWS, text=2)
    widths = [max(map(len, lines(built, width))) for width in (300, 90, 70)]
    assert widths[0] > 90 >= widths[1] > 70 >= widths[2]


def test_blocks_repeat_the_first_column() -> None:
    shown = lines(table("", ("rank", *(f"figure{number}" for number in range(12))), [range(13)]), 60)
    headed = [line for line in shown if "rank" in line]
    assert len(headed) == 2 and all(line.split()[0] == "rank" for line in headed)
    assert max(map(len, shown)) <= 60


def test_names_and_values_are_wrapped_between_words() -> None:
    shown = lines(facts([("memory", "12 GiB " * 10), ("path", "/a/path")]), 40)
    assert max(map(len, shown)) <= 40 and words("\n".join(shown))["GiB"] == 10
    assert "/a/long/path" * 8 in "".join(lines(facts([("path", "/a/long/path" * 8)]), 40))


@given(
    st.lists(st.lists(st.text("ab1 .", max_size=12), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(30, 90),
)
def test_any_table_keeps_its_words(rows: list[list[str]], width: int) -> None:
    shown = lines(table("", ("one", "two words", "three", "four"), rows, text=2), width)
    assert max(map(len, shown)) <= width
    assert words("\n".join(shown)) >= words("\n".join(cell for row in rows for cell in row))
