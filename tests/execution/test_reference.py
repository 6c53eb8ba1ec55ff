"""How fast a machine is beside when it was probed: which steps are looked behind, and what a real run records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stagewright.cluster import load_cluster
from stagewright.execution.clock import moment, undelayed_s
from stagewright.execution.launch import run
from stagewright.execution.record import load_record
from stagewright.execution.reference import Reference, SpeedWatch
from stagewright.planning.job import Job
from stagewright.planning.search import plan

CPU = torch.device("cpu")


def test_a_machine_that_was_not_probed_is_not_looked_at() -> None:
    speed = SpeedWatch(CPU, None)
    speed.after(0, 1.0, 0.0)
    assert speed.slowdowns == []


def test_looking_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five of them are 10 ms.
    speed = SpeedWatch(CPU, 1e-3)
    looks = []
    monkeypatch.setattr(Reference, "seconds", lambda self, during_s: looks.append(during_s) or 2e-3)
    for step in range(9):
        speed.after(step, 0.25, 0.0)  # 10 ms are a hundredth of four steps
    assert speed.slowdowns == [(step, 2.0) for step in range(9)]
    assert len(looks) == 3
    speed = SpeedWatch(CPU, 1e-3)
    for step in range(3):
        speed.after(step, 2.0, 0.0)
    assert len(looks) == 6


def test_what_a_rank_waits_for_a_processor_is_the_machines_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "seconds", lambda self, during_s: 1.5e-3)
    speed = SpeedWatch(CPU, 1e-3)
    speed.after(0, 1.0, 0.25)
    assert speed.slowdowns == [(0, pytest.approx(1.5 / 0.75))]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say for how long threads wait")
def test_a_clock_stands_still_while_others_have_the_processor() -> None:
    """Beside a program that is as busy on the same core a thread has half of the time, and its clock counts that half."""
    cores = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, busy.pid):
            os.sched_setaffinity(process, {min(cores)})
        began = moment()
        while time.perf_counter() - began.clock_s < 0.5:
            pass
        assert undelayed_s(began) < 0.8 * (time.perf_counter() - began.clock_s)
    finally:
        os.sched_setaffinity(0, cores)
        busy.kill()
        busy.wait()


@pytest.mark.multiprocess
def test_every_rank_of_a_run_records_what_it_saw(tmp_path: Path) -> None:
    probed = load_cluster("2x-rtx3090", {"device.kind": "cpu", "device.reference_s": "1e-9"})
    job = Job(global_batch=2, sequence_length=16, dtype="fp32", num_steps=3)
    plan("tiny-llama", probed, job, pp=2).plans[0].save(tmp_path / "plan.json")
    run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu", timeout=60)
    record = load_record(tmp_path / "run" / "record.json")
    for rank in record.ranks:
        assert rank.slowdowns and all(ratio > 1 for _, ratio in rank.slowdowns)  # of a nanosecond
