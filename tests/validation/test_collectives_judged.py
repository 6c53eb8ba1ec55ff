"""Collectives inside a node against NCCL's benchmark: the bars."""

from __future__ import annotations

from collections import Counter

from collectives import BARS, judged
from verdict import summary


def test_collectives_inside_a_node_stay_within_their_bars() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged(left_out=left_out))
    assert len(rows) + sum(left_out.values()) == 1460
    assert len(rows) > 1200
    for group, bar in BARS.items():
        assert summary(group, [row for row in rows if row.group == group]).mean <= bar
