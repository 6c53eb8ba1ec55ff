"""A plan whose operators run again several times trains as one that keeps everything, in the memory that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan, peaks_on_cpus, trained

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_plan_with_reruns_trains_as_one_that_keeps_everything(schedule: str, tmp_path: Path) -> None:
    """With whole and with split backwards, dropout included."""
    sizes = {
        "schedule": schedule,
        "model": "tiny-gpt2",
        "overrides": {},
        "num_steps": 2,
        "sequence_length": 64,
    }
    kept = make_plan(tmp_path / "kept.json", **sizes)
    reruns = make_plan(tmp_path / "reruns.json", policy="reruns", **sizes)
    again = estimate(reruns, load_cluster("2x-h100"))
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    wanted, got = trained(kept, tmp_path / "one"), trained(again, tmp_path / "other")
    assert got.losses == wanted.losses and got.gradient_norms == wanted.gradient_norms
    predicted = peaks_on_cpus(again)
    assert [rank.allocated_peak_bytes for rank in got.ranks] == predicted
    assert all(stage.recomputed_bytes for stage in again.predictions.stages)
