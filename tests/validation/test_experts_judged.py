"""Matmuls of experts against PyTorch's and TensorRT-LLM's: the bars, of which that of whole layers is not reached."""

from __future__ import annotations

import statistics
from collections import Counter

from experts import BAR, judged_layers, judged_products
from verdict import summary


def test_grouped_products_stay_within_their_bar() -> None:
    rows = list(judged_products())
    assert len(rows) == 5
    assert summary("all", rows).mean <= BAR


def test_most_layers_of_experts_are_within_their_bar() -> None:
    left_out: Counter[str] = Counter()
    rows = list(judged_layers(left_out=left_out))
    assert len(rows) + sum(left_out.values()) == 2384
    for half in ("fit", "other"):
        own = [row for row in rows if row.half == half]
        assert summary(half, own).mean <= 0.14
        assert statistics.median(abs(row.error) for row in own) <= BAR
