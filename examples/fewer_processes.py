"""Trains on several processes, then goes on from the checkpoint on fewer, under another plan.

    stagewright probe --processes 2 -o local.toml
    python examples/fewer_processes.py --first 2 --then 1

As after the loss of a node: plan for what is left, and resume. Both halves have the samples that one run would have in these
steps, so the loss goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import stagewright
from stagewright.tracing.models.reference import resolve

TEXT = Path(stagewright.__file__).parent / "data" / "moby_dick.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cluster", default="local.toml", help="a file of `stagewright probe`, or a catalog name"
    )
    parser.add_argument("--first", type=int, default=2, help="processes of the first half")
    parser.add_argument("--then", type=int, default=1, help="processes of the second")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/fewer-processes"))
    options = parser.parse_args()

    cluster = stagewright.load_cluster(options.cluster)
    model = resolve("tiny-llama", {"num_hidden_layers": options.layers})
    job = stagewright.Job(
        global_batch=16, sequence_length=128, dtype="fp32", learning_rate=1e-3, num_steps=options.steps
    )
    half = options.steps // 2
    for processes, steps in ((options.first, half), (options.then, options.steps)):
        folder = options.out / f"on-{processes}"
        best = stagewright.plan(model, cluster, job, pp=processes, dp=1).plans[0]
        best.save(folder / "plan.json")
        record = stagewright.run(
            folder / "plan.json",
            TEXT,
            steps,
            out=folder,
            checkpoint=options.out / "checkpoints",
            resume=steps > half,
        )
        assert record is not None, "started by no launcher, this process has the record"
        first, last = record.first_step + 1, record.first_step + len(record.losses)
        print(
            f"steps {first} to {last} by {processes} process{'es' * (processes > 1)}, {best.schedule}, "
            f"stages: {best.num_stages}, loss {record.losses[0]:.3f} to {record.losses[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
