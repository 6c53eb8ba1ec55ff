"""A run that loses a rank goes on with those that are left, under another plan, from its newest checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from cells import SMALL_LLAMA

import stagewright
from faults import started_run
from local_cluster import local
from stagewright.cluster import MeasuredBandwidth, load_cluster, without
from stagewright.errors import InputError, RunError
from stagewright.execution import launch, replan
from stagewright.execution.heartbeat import Seal, StoreBoard
from stagewright.execution.options import RunOptions
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import resolve


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = stagewright.Job(global_batch=12, sequence_length=32, dtype="fp32", num_steps=100000)
    model = resolve("tiny-llama", dict(SMALL_LLAMA))
    return stagewright.plan(
        model, local(4), job, pp=4, dp=1, tp=1, schedules="1f1b", is_improved=False
    ).plans[0]


def test_a_cluster_without_some_devices() -> None:
    whole = load_cluster("3x2x-a10g")
    matrix = tuple(tuple(1e9 * (6 * row + column + 1) for column in range(6)) for row in range(6))
    measured = whole.model_copy(update={"measured": MeasuredBandwidth(between="ranks", bandwidth=matrix)})
    found = without(measured, {1, 2, 3})
    assert [(group.count, group.devices_per_node) for group in found.nodes] == [(1, 1), (1, 2)]
    assert found.measured is not None
    assert found.measured.bandwidth[0] == (matrix[0][0], matrix[0][4], matrix[0][5])
    between = MeasuredBandwidth(bandwidth=((1e9, 2e9, 3e9), (4e9, 5e9, 6e9), (7e9, 8e9, 9e9)))
    found = without(whole.model_copy(update={"measured": between}), {0, 1, 2})
    assert found.measured is not None and found.measured.bandwidth == ((5e9, 6e9), (8e9, 9e9))


def test_a_launcher_with_fewer_processes_has_another_plan(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first rank makes it, and another finds it; with as many as ranks the plan stays."""
    options = RunOptions(plan, device="cpu", start_timeout=0.1, checkpoint=tmp_path, replan=True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert replan.plan_to_run(options) == replan.PlanToRun(plan, None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    made = replan.plan_to_run(options)
    assert made.is_replanned and made.plan.num_ranks == 3
    assert re.search(r"3 of 4 ranks remain: planned again in .*: pp \d, dp \d, ", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "2")
    assert replan.plan_to_run(options) == made and made.path is not None
    made.path.unlink()
    with pytest.raises(RunError, match="file system that all machines share"):
        replan.plan_to_run(options)


def test_a_plan_of_an_earlier_start_is_not_taken(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the launcher has a store, the first rank posts there what it has written."""
    board = StoreBoard(dist.HashStore(), Seal("secret"))
    monkeypatch.setattr(replan, "_board", lambda wait_s: board)
    stale = replan._place(plan, 3, tmp_path)
    plan.save(stale)
    options = RunOptions(plan, device="cpu", start_timeout=0.1, checkpoint=tmp_path, replan=True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(RunError, match="has written no plan for"):
        replan.plan_to_run(options)
    monkeypatch.setattr(
        replan, "plan_without", lambda *_: replan.PlanToRun(plan, stale, plan.save(stale) is None)
    )
    monkeypatch.setenv("RANK", "0")
    begun = replan.plan_to_run(options)
    monkeypatch.setenv("RANK", "2")
    assert replan.plan_to_run(options).path == begun.path == stale
    stale.write_bytes(stale.read_bytes() + b"\n")
    with pytest.raises(RunError, match="has written no plan for"):
        replan.plan_to_run(options)


def test_replan_needs_a_folder_for_checkpoints(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="--replan needs --checkpoint FOLDER"):
        launch.run(tmp_path / "plan.json", replan=True)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_run_goes_on_without_a_rank_that_is_killed(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    kept = tmp_path / "kept"
    words = ("--device", "cpu", "--out", str(tmp_path / "out"), "--checkpoint", str(kept))
    every = ("--checkpoint-every", "20", "--keep-last", "2", "--replan")
    with started_run(tmp_path / "log", str(tmp_path / "plan.json"), *words, *every) as run:
        run.wait_for(lambda: list(kept.glob("step-*")))
        os.kill(run.rank(2), signal.SIGKILL)
        run.wait_for_words("3 of 4 ranks remain: planned again in ")
        again = run.said.index("3 of 4 ranks remain")
        run.wait_for(lambda: len(re.findall(r"^step \d+/", run.said[again:], re.M)) > 2)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.end(60)[0] == 128 + signal.SIGTERM, run.said
    assert "rank 2 (process" in run.said[:again] and "ended with SIGKILL" in run.said[:again]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert len(record["ranks"]) == 3 and Path(record["plan"]).parent == kept
    assert record["first_step"] % 20 == 0 and record["first_step"] > 0
    before, after = (
        {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\S+\s+loss (\S+)", part, re.M)}
        for part in (run.said[:again], run.said[again:])
    )
    assert min(after) == record["first_step"] + 1
    assert all(after[step] == pytest.approx(before[step], rel=1e-3) for step in before.keys() & after.keys())
