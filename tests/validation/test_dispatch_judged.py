"""Exchanges of tokens against DeepEP's times: the bar."""

from __future__ import annotations

from collections import Counter

from dispatch import BAR, judged
from verdict import summary


def test_exchanges_of_tokens_stay_within_their_bar() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged(left_out=left_out))
    assert len(rows) == 1358
    assert sum(left_out.values()) == 12
    for half in ("fit", "other"):
        assert summary(half, [row for row in rows if row.half == half]).mean <= BAR
