"""Predicted bytes and seconds of eager steps on one H100: the bounds reached, on rows that are traced quickly."""

from __future__ import annotations

from h100_eager import BARS, DATA, judge, read

ROWS = {"hf_clip 64x20x336 HP AC", "timm_convnext_v2 256x224 HP AC"}


def test_eager_steps_stay_within_their_bounds() -> None:
    found = judge(case for case in read(DATA) if case.label in ROWS)
    errors = {kind: [abs(row.error) for row in rows] for kind, rows in found.items()}
    assert all(len(values) == len(ROWS) for values in errors.values())
    assert max(errors["active"]) < BARS["active"]
    assert max(errors["reserved"]) < BARS["reserved"]
    assert max(errors["time"]) < BARS["time"]
