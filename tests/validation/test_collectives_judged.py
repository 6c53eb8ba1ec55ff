"""Collectives inside a node and over several against NCCL's benchmark: the bars."""

from __future__ import annotations

from collections import Counter

from collectives import BAR_OF_NODES, BARS, MESSAGES, judged, judged_over_nodes
from verdict import summary


def test_collectives_inside_a_node_stay_within_their_bars() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged(left_out=left_out))
    assert len(rows) + sum(left_out.values()) == 1460
    assert len(rows) > 1200
    for group, bar in BARS.items():
        assert summary(group, [row for row in rows if row.group == group]).mean <= bar


def test_collectives_over_nodes_stay_within_their_bar() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged_over_nodes(left_out=left_out))
    assert len(rows) + sum(left_out.values()) == 135
    sent = [row for row in rows if MESSAGES not in row.group]
    assert len(sent) > 90
    for half in ("fit", "other"):
        assert summary(half, [row for row in sent if row.half == half]).mean <= BAR_OF_NODES / 2
