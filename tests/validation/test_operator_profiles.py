"""Predicted operator times against profiles of four GPUs: the bounds reached."""

from __future__ import annotations

from operators import BAR, judged
from verdict import grouped, summary


def test_operator_times_stay_within_the_bar() -> None:
    """Over all operators longer than 50 us, and as well on settings that no constant has seen."""
    rows = judged()
    assert len(rows) > 5000
    assert summary("all", rows).mean < BAR
    halves = [summary(half, [row for row in rows if row.half == half]).mean for half in ("fit", "kept aside")]
    assert abs(halves[0] - halves[1]) < 0.02
    assert len(grouped(rows)) == 72  # 9 classes of operators, both directions, four devices


def test_one_device_keeps_its_bound() -> None:
    bounds = {"a10g": 0.07, "a100-40": 0.125, "v100-32": 0.135, "l4": 0.16}
    rows = judged()
    for device, bound in bounds.items():
        assert summary(device, [row for row in rows if row.label.startswith(f"{device} ")]).mean < bound
