"""A run of a thousand steps leaves nothing behind: memory, open files, threads, processes and shared memory stay the same.

    python benchmarks/long_run.py [--steps 1000] [--ranks 4]

Local processes train a small Llama under a pipeline with replicas, with a checkpoint every 100 steps. Every rank looks at
itself after step 20 and after the last: resident memory, open files, threads, children; and this process at what lies in
shared memory before the run and after it. Prints what came to be, and exits with 1 where something grew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from figures import machine
from local_cluster import local

MOST_GROWTH_BYTES = 24 * 2**20
"""Of a process: the allocator of the C library hands memory back as it likes."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    import stagewright
    from stagewright.tracing.models.reference import resolve

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    job = stagewright.Job(global_batch=8, sequence_length=32, dtype="fp32", num_steps=options.steps)
    widths: dict[str, Any] = {"pp": 2, "dp": options.ranks // 2, "tp": 1, "zero": 1}
    found = stagewright.plan(
        resolve("tiny-llama", shape), local(options.ranks), job, schedules="1f1b", **widths
    )
    shared = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        found.plans[0].save(f"{folder}/plan.json")
        words = [str(Path(__file__).resolve()), folder]
        from stagewright.execution.processes import start_ranks

        start_ranks("stagewright.execution.script", words, list(range(options.ranks)))
        looks = [
            json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(options.ranks)
        ]
    left = sorted(shared_memory() - shared)
    grew = bool(left)
    print(json.dumps(machine()))
    for rank, (early, late) in enumerate(looks):
        more = {key: late[key] - early[key] for key in early}
        grew |= (
            more["bytes"] > MOST_GROWTH_BYTES
            or more["files"] > 0
            or more["threads"] > 0
            or more["children"] > 0
        )
        grown, whole = (one["bytes"] / 2**20 for one in (more, late))
        print(
            f"rank {rank}: from step 20 to {options.steps}: {grown:+.1f} MiB of {whole:.0f}, {more['files']:+d} files of "
            f"{late['files']}, {more['threads']:+d} threads, {more['children']:+d} processes"
        )
    print(f"left in shared memory: {', '.join(left) or 'nothing'}; {'GREW' if grew else 'nothing grew'}")
    return int(grew)


def work(folder: str) -> None:
    """Train on this rank."""
    import stagewright

    looks: list[dict[str, int]] = []
    trainer = stagewright.Trainer(
        f"{folder}/plan.json", out=f"{folder}/run", device="cpu", random_weights=True,
        checkpoint=f"{folder}/checkpoints", checkpoint_every=100, keep_last=1,
    )  # fmt: skip
    step = trainer.step

    def looking(batch: Any = None) -> Any:
        result = step(batch)
        if trainer.step_number in (20, trainer.num_steps):
            looks.append(look())
        return result

    trainer.step = looking
    trainer.fit()
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(looks))


def look() -> dict[str, int]:
    """What this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = os.listdir("/proc/self/fd")
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(files), "threads": threading.active_count(),
        "children": len(children),
    }  # fmt: skip


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1])
    else:
        sys.exit(main())
