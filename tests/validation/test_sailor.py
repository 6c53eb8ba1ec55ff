"""Published runs on GH200 stay within their bounds."""

from __future__ import annotations

import memory_safety
import pytest
import sailor
from verdict import summary


@pytest.mark.parametrize("what", sailor.BARS)
def test_runs_on_gh200_stay_within_their_bounds(what: str) -> None:
    found = list(sailor.rows(what))
    assert len(found) == 14
    assert summary(what, found).mean <= sailor.BARS[what]


def test_nothing_measured_would_be_recommended_above_its_memory() -> None:
    found = list(memory_safety.rows())
    assert len(found) >= 60
    assert memory_safety.unsafe(found) == []
