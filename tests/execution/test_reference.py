"""How fast a machine is beside when it was probed: which steps are looked behind, and what a real run records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagewright.cluster import load_cluster
from stagewright.execution.launch import run
from stagewright.execution.record import load_record
from stagewright.execution.reference import Reference, SpeedWatch
from stagewright.planning.job import Job
from stagewright.planning.search import plan

CPU = torch.device("cpu")


def test_a_machine_that_was_not_probed_is_not_looked_at() -> None:
    speed = SpeedWatch(CPU, None)
    speed.after(0, 1.0)
    assert speed.slowdowns == []


def test_looking_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "seconds", lambda self, during_s: 2e-3)  # five of them are 10 ms
    speed = SpeedWatch(CPU, 1e-3)
    for step in range(9):
        speed.after(step, 0.25)  # 10 ms are a hundredth of four steps
    assert speed.slowdowns == [(0, 2.0), (4, 2.0), (8, 2.0)]
    speed = SpeedWatch(CPU, 1e-3)
    for step in range(3):
        speed.after(step, 2.0)
    assert [step for step, _ in speed.slowdowns] == [0, 1, 2]


@pytest.mark.multiprocess
def test_every_rank_of_a_run_records_what_it_saw(tmp_path: Path) -> None:
    probed = load_cluster("2x-rtx3090", {"device.kind": "cpu", "device.reference_s": "1e-9"})
    job = Job(global_batch=2, sequence_length=16, dtype="fp32", num_steps=3)
    plan("tiny-llama", probed, job, pp=2).plans[0].save(tmp_path / "plan.json")
    run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu", timeout=60)
    record = load_record(tmp_path / "run" / "record.json")
    for rank in record.ranks:
        assert rank.slowdowns and all(ratio > 1 for _, ratio in rank.slowdowns)  # of a nanosecond
