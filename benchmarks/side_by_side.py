"""Step times of several plans on this machine, all held by the same processes, which take their steps in turn."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from local_cluster import start_ranks

OMITTED = 2
"""First rounds, which warm up."""


class Seat(NamedTuple):
    """What the process of a rank computes with: threads, and the cores it is kept on (None: any)."""

    threads: int = 1
    cores: tuple[int, ...] | None = None


def step_seconds(
    plans: Sequence[Path], num_ranks: int, rounds: int, seats: Sequence[Seat] | None = None
) -> list[list[float]]:
    """For each plan the seconds of `rounds` steps; round by round every plan has its turn, in changing order.

    Every rank has a thread of its own, or what `seats` says.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        taken = json.dumps(seats or [Seat()] * num_ranks)
        start_ranks(__file__, num_ranks, str(rounds), str(out), taken, *map(str, plans))
        return json.loads(out.read_text())


def _work(rounds: int, out: Path, seats: Sequence[Seat], paths: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.execution.allocation import keep_freed_memory
    from stagewright.execution.session import Session
    from stagewright.planning.plan import load_plan

    seat = seats[int(os.environ["RANK"])]
    if seat.cores is not None:
        os.sched_setaffinity(0, seat.cores)
    torch.set_num_threads(seat.threads)
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
    _work(
        int(sys.argv[1]), Path(sys.argv[2]), [Seat(*seat) for seat in json.loads(sys.argv[3])], sys.argv[4:]
    )
