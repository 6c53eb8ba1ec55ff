"""A rank that runs out of memory names the action, what was alive and what to try, and the run ends."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from multiprocess import Failed, Returned, run_ranks, watch_ranks
from stagewright.cluster import load_cluster
from stagewright.errors import RunError
from stagewright.planning.job import Job
from stagewright.planning.plan import load_plan
from stagewright.planning.search import plan
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess

MIB = 2**20


def planned(path: Path, sequence_length: int = 64) -> str:
    job = Job(global_batch=8, sequence_length=sequence_length, dtype="fp32", num_steps=2)
    reference = resolve("tiny-llama", {"num_hidden_layers": 4})
    found = plan(reference, load_cluster("2x-h100"), job, pp=2, microbatch=2, schedules=["gpipe"])
    found.plans[0].save(path)
    return str(path)


def test_every_rank_stops_and_says_why(tmp_path: Path) -> None:
    """A GPU that is full, as far as PyTorch's exception goes."""
    path = planned(tmp_path / "plan.json")
    ends = watch_ranks(fail_on_the_second_rank, 2, path, str(tmp_path), timeout=90)
    first, second = ends
    assert isinstance(first, Failed) and "exit code 1" in first.reason
    assert isinstance(second, Returned) and second.result == 1
    message = (tmp_path / "said-1").read_text()
    assert (
        "rank 1 failed at 1B2: out of memory at 1B2 on rank 1 (device 1, h100) (Tried to allocate 2.00 GiB)"
        in message
    )
    assert "alive: parameters " in message and "activations of stage 1 (2 microbatches) " in message
    assert "the plan predicted a peak of " in message and "Plan again with --memory-limit " in message
    assert "rank 1" in (tmp_path / "said-0").read_text()


def fail_on_the_second_rank(rank: int, num_ranks: int, path: str, out: str) -> int:
    import torch

    from stagewright.execution.stage_runner import StageRunner, Tensors
    from stagewright.execution.worker import main

    backward = StageRunner.backward

    def full(self: StageRunner, microbatch: int, cotangents: Tensors) -> Tensors:
        if rank == 1 and microbatch == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 80 GiB"
            )
        return backward(self, microbatch, cotangents)

    StageRunner.backward = full  # type: ignore[method-assign]
    os.environ["LOCAL_RANK"] = str(rank)
    sys.stderr = Path(out, f"said-{rank}").open("w", buffering=1)  # noqa: SIM115 until the process ends
    return main(json.dumps({"plan": path, "out": out, "random_weights": True}))


def test_a_limit_of_the_process(tmp_path: Path) -> None:
    """Memory that the operating system refuses."""
    (message,) = run_ranks(train_within, 1, planned_alone(tmp_path / "plan.json"), timeout=90)
    assert (
        "out of memory at 0F0 on rank 0 (device 0, h100) (can't allocate memory: you tried to allocate "
        in message
    )
    assert "alive: parameters 18.5 MiB, gradients 18.5 MiB, " in message
    assert "Plan again with --memory-limit " in message


def planned_alone(path: Path) -> str:
    job = Job(global_batch=4, sequence_length=1024, dtype="fp32", num_steps=1)
    found = plan(resolve("tiny-llama"), load_cluster("1x-h100"), job, microbatch=4)
    found.plans[0].save(path)
    return str(path)


def train_within(rank: int, num_ranks: int, path: str) -> str:
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    session: Any = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 48 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        session.train_step(0)
    except RunError as error:
        return str(error)
    return "there was enough"
