"""Predicted peak bytes of a pipeline of two processes are those that were alive, and a leak of one tensor shows."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_memory import BAR, Measured, measure, plan  # pyright: ignore[reportMissingImports]

from multiprocess import run_ranks
from stagewright.planning.plan import Plan

pytestmark = pytest.mark.multiprocess

CASES = (("tiny-llama", "1f1b"), ("tiny-gpt2", "zb-h1"))


def _work(rank: int, num_ranks: int, wanted: list[Plan], leaks: bool) -> list[Measured]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return [measure("", one, _leak if leaks and rank == 0 else lambda session: None) for one in wanted]
    finally:
        dist.destroy_process_group()


def _leak(session: Any) -> None:
    """From now on the first stage of the rank never lets go of one tensor that its forward makes."""
    runner = session.runner.runners[0]
    forward, kept = runner.forward, []

    def leaking(*args: Any) -> Any:
        made = forward(*args)
        kept.append(next(iter(made.values())).clone())
        return made

    runner.forward = leaking


def test_peaks_are_those_that_were_alive() -> None:
    wanted = [plan(model, schedule, 2, 1, 32, count=4) for model, schedule in CASES]
    for rank, found in enumerate(run_ranks(_work, 2, wanted, False)):
        for one in found:
            assert one.rank == rank
            assert abs(one.row().error) <= BAR, f"{one}"


def test_a_leak_of_one_tensor_shows() -> None:
    wanted = [plan("tiny-llama", "1f1b", 2, 4, 64, count=4)]
    leaking, honest = (found[0].row().error for found in run_ranks(_work, 2, wanted, True))
    assert leaking < -BAR
    assert abs(honest) <= BAR
