"""What a checkpoint costs the training beside it: blocks of steps with one and without, in turn, in the same processes.

    python benchmarks/saving_cost.py [--blocks 8] [--steps 20] [--hidden 256] [--json]

Two local processes train a small Llama under a 1F1B plan. Every other block of steps begins with a checkpoint, whose files
are written beside it and are whole at its end. Prints the median of the paired ratios of the blocks' times, a 95 % bootstrap
interval of it, and how much was written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import interval, machine
from local_cluster import local, start_ranks

BAR = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        _planned(options).save(f"{folder}/plan.json")
        start_ranks(__file__, 2, *sys.argv[1:], "--folder", folder)


def _planned(options: argparse.Namespace) -> Any:
    import stagewright
    from stagewright.tracing.models.reference import resolve

    shape = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_hidden_layers": 8}
    job = stagewright.Job(global_batch=8, sequence_length=128, dtype="fp32")
    model = resolve("tiny-llama", shape)
    return stagewright.plan(
        model, local(2), job, pp=2, dp=1, tp=1, schedules="1f1b", is_improved=False
    ).plans[0]


def _work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.execution.checkpoint import Saver
    from stagewright.execution.session import Session
    from stagewright.planning.plan import load_plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    session = Session(load_plan(options.folder / "plan.json"), torch.device("cpu"), None, random_weights=True)
    saver, step = Saver(session, options.folder / "checkpoints"), 0
    ratios, size = [], 0
    for pair in range(options.blocks + 1):
        seconds = {}
        for saves in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            start = time.perf_counter()
            if saves:
                saver.start(step)
            for _ in range(options.steps):
                session.train_step(step)
                step += 1
            if saves:
                saver.finish()
            dist.barrier()
            seconds[saves] = time.perf_counter() - start
            if saves and dist.get_rank() == 0:
                newest = max((options.folder / "checkpoints").glob("step-*"))
                size = sum(file.stat().st_size for file in newest.iterdir())
                shutil.rmtree(newest)
        if pair:  # the first makes the copies' memory
            ratios.append(seconds[True] / seconds[False])
    if dist.get_rank() == 0:
        low, high = interval(ratios)
        median = statistics.median(ratios)
        if options.json:
            print(json.dumps({"machine": machine(), "ratio": median, "interval": [low, high], "bytes": size}))
        else:
            verdict = "keeps to" if median <= BAR else "MISSES"
            print(
                f"a checkpoint of {size / 2**20:.0f} MiB per {options.steps} steps: ratio {median:.3f}, 95 % [{low:.3f}, "
                f"{high:.3f}]; {verdict} {BAR}"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
