"""Matmuls by their shapes against what three GPUs took: the bounds reached."""

from __future__ import annotations

from products import judged
from verdict import summary


def test_products_of_every_size_and_large_ones_stay_within_their_bounds() -> None:
    rows = list(judged())
    assert len(rows) == 8142
    large = [row for row in rows if row.group.endswith("large")]
    assert summary("all", rows).mean < 0.08
    assert summary("large", large).mean < 0.06
    a100 = [row for row in large if row.group.startswith("a100-80")]
    assert summary("A100", a100).mean < 0.045
