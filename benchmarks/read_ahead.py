"""What reading ahead gains: steps on a dataset whose samples take their time, read ahead and read when the step begins.

    python benchmarks/read_ahead.py [--steps 60] [--milliseconds 0 2 5 10]

Two local processes train a small Llama under a pipeline, on a dataset each sample of which sleeps so long. Prints the
median from the end of one step to that of the next, and whether the losses are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import machine
from local_cluster import local

BATCH, LENGTH = 8, 64
_MILLISECONDS = "MILLISECONDS_PER_SAMPLE"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0, 2, 5, 10])
    options = parser.parse_args()
    import stagewright
    from stagewright.execution.processes import start_ranks

    job = stagewright.Job(global_batch=BATCH, sequence_length=LENGTH, dtype="fp32", num_steps=options.steps)
    found = stagewright.plan(
        "tiny-llama", local(2), job, pp=2, dp=1, tp=1, schedules="1f1b", is_improved=False
    )
    print(json.dumps(machine()))
    are_same = True
    for milliseconds in options.milliseconds:
        os.environ[_MILLISECONDS] = str(milliseconds)
        seen: dict[str, dict[str, list[float]]] = {}
        for how in ("when it begins", "ahead"):
            with tempfile.TemporaryDirectory() as folder:
                found.plans[0].save(f"{folder}/plan.json")
                words = [str(Path(__file__).resolve()), folder, how]
                start_ranks("stagewright.execution.script", words, [0, 1])
                seen[how] = json.loads(Path(folder, "seen.json").read_text())
        same = seen["ahead"]["losses"] == seen["when it begins"]["losses"]
        are_same &= same
        times = {how: statistics.median(one["seconds"]) * 1e3 for how, one in seen.items()}
        print(
            f"{BATCH} samples of {milliseconds:g} ms: a step takes {times['when it begins']:.1f} ms, read ahead "
            f"{times['ahead']:.1f} ms; losses {'the same' if same else 'DIFFER'}"
        )
    return int(not are_same)


def work(folder: str, how: str) -> None:
    """Train on this rank."""
    import stagewright
    from stagewright.execution.data.prefetch import Prefetcher

    if how != "ahead":
        Prefetcher.read_ahead = lambda self, wanted: None
    ends: list[float] = []
    trainer = stagewright.Trainer(
        f"{folder}/plan.json", f"{Path(__file__).resolve()}:Sleeping", out=f"{folder}/run", device="cpu",
        callbacks=[lambda step: ends.append(time.perf_counter())],
    )  # fmt: skip
    record = trainer.fit()
    if record is not None:
        seconds = [after - before for before, after in pairwise(ends[3:])]  # the first are metered
        Path(folder, "seen.json").write_text(json.dumps({"seconds": seconds, "losses": record.losses}))


class Sleeping:
    """A dataset whose samples take their time."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        time.sleep(float(os.environ[_MILLISECONDS]) / 1e3)
        return {"input_ids": np.random.default_rng(index).integers(0, 256, LENGTH)}


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(*sys.argv[1:])
    else:
        sys.exit(main())
