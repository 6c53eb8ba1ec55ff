"""Step times of several plans on this machine, all held by the same processes, which take their steps in turn."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

OMITTED = 2
"""First rounds, which warm up."""


def step_seconds(plans: Sequence[Path], num_ranks: int, rounds: int) -> list[list[float]]:
    """For each plan the seconds of `rounds` steps; round by round every plan has its turn, in changing order."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        1, 1, num_ranks, run_id="in-turn", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        elastic_launch(config, sys.executable)(__file__, str(rounds), str(out), *map(str, plans))
        return json.loads(out.read_text())


def _work(rounds: int, out: Path, paths: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.execution.heap import keep_freed_memory
    from stagewright.execution.session import Session
    from stagewright.planning.plan import load_plan

    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    sessions = [Session(load_plan(path), torch.device("cpu"), None, random_weights=True) for path in paths]
    seconds: list[list[float]] = [[] for _ in paths]
    for number in range(rounds + OMITTED):
        order = range(len(paths)) if number % 2 else reversed(range(len(paths)))
        for index in order:
            dist.barrier()
            taken = torch.tensor(sessions[index].train_step(number).seconds, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number >= OMITTED:
                seconds[index].append(float(taken))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
