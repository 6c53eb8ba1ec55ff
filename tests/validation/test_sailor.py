"""Published runs on GH200 stay within their bounds."""

from __future__ import annotations

import pytest
import sailor
from verdict import summary


@pytest.mark.parametrize("what", sailor.BARS)
def test_runs_on_gh200_stay_within_their_bounds(what: str) -> None:
    found = list(sailor.rows(what))
    assert len(found) == 14
    assert summary(what, found).mean <= sailor.BARS[what]
