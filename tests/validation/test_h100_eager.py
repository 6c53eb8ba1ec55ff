"""Predicted bytes and seconds of eager steps on one H100: the bounds reached, on rows that are traced quickly."""

from __future__ import annotations

from pathlib import Path

from h100_eager import BARS, DATA, judge, read

ROWS = {"hf_clip 64x20x336 HP AC", "timm_convnext_v2 256x224 HP AC"}


def test_eager_steps_stay_within_their_bounds() -> None:
    found = judge(case for case in read(DATA) if case.label in ROWS)
    errors = {kind: [abs(row.error) for row in rows] for kind, rows in found.items()}
    assert all(len(values) == len(ROWS) for values in errors.values())
    assert max(errors["active"]) < BARS["active"]
    assert max(errors["reserved"]) < BARS["reserved"]
    assert max(errors["time"]) < 1.5 * BARS["time"]  # which is of the mean over all rows


def test_the_path_of_attention_is_data(tmp_path: Path) -> None:
    assert {case.model: case.attention for case in read(DATA)} == {
        "hf_GPT2": "sdpa", "hf_T5": "eager", "hf_clip": "sdpa", "timm_convnext_v2": "none",
    }  # fmt: skip
    rows = (DATA / "eager_h100_single_gpu.csv").read_text().splitlines()[:2]
    (tmp_path / "eager_h100_single_gpu.csv").write_text("\n".join(rows))
    (tmp_path / "attention.csv").write_text("model,attention,reason\nhf_GPT2,eager,an older library\n")
    (case,) = read(tmp_path)
    assert case.attention == "eager"
    assert judge([case])["active"][0].predicted > 1.2 * case.active_bytes
