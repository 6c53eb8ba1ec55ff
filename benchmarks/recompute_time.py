"""What recomputation adds to a step on this machine, beside what was predicted, and peaks beside the replay's.

    python benchmarks/recompute_time.py [--rounds 20] [--limits 0.85 0.75] [--output FILE]

A small Llama (8 layers, hidden 512, sequence 512) on two local ranks of one thread, 1F1B with 8 microbatches. Four plans,
held by the same processes, take their steps in turn: everything kept; what enters each layer kept (`--recompute full`) with
the same cuts; and what the planner recomputes where the memory limit is so many parts of what keeping everything takes.
Added time is that over the plan which keeps everything, in parts of its step, the median over rounds; predicted with the
rates of this machine as it is probed now. Bar: within 10 % of what is predicted. Peaks are those of two steps of `run`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import interval, write

os.environ.setdefault("OMP_NUM_THREADS", "1")

MODEL = "tiny-llama"
OVERRIDES = {
    "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
LENGTH, MICROBATCHES = 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limits", type=float, nargs="*", default=[0.85, 0.75])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    write(report(options), options.output)


def report(options: argparse.Namespace) -> Iterator[str]:
    from side_by_side import step_seconds
    from stagewright.execution.launch import run

    plans = made(options.limits)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, plan in enumerate(plans.values()):
            paths.append(Path(folder) / f"{number}.json")
            plan.save(paths[-1])
        records = [run(path, out=path.with_suffix(""), device="cpu", steps=2) for path in paths]
        seconds = step_seconds(paths, 2, options.rounds)
    kept_s = next(iter(plans.values())).predictions.step_seconds
    yield f"Python {platform.python_version()}, {os.cpu_count()} cores; {options.rounds} rounds"
    yield ""
    yield "| plan | predicted step | median step | added, predicted | added, measured (95 %) | difference | peaks |"
    yield "| --- | --: | --: | --: | --: | --: | --- |"
    for (name, plan), own, record in zip(plans.items(), seconds, records, strict=True):
        ratios = [one / kept - 1 for one, kept in zip(own, seconds[0], strict=True)]
        added, (low, high) = statistics.median(ratios), interval(ratios)
        promised = plan.predictions.step_seconds / kept_s - 1
        difference = f"{added / promised - 1:+.0%}" if promised > 0.01 else ""
        peaks = [
            f"{measured / predicted.allocated_peak_bytes - 1:+.2%}"
            for measured, predicted in zip(_peaks(record), plan.predictions.ranks, strict=True)
        ]
        yield (
            f"| {name} | {plan.predictions.step_seconds:.3f} s | {statistics.median(own):.3f} s | {promised:.1%} "
            f"| {added:.1%} ({low:.1%} to {high:.1%}) | {difference} | {', '.join(peaks)} |"
        )


def made(limits: list[float]) -> dict[str, Any]:
    """The plans by name, the one that keeps everything first."""
    from stagewright.execution.probe import probe
    from stagewright.planning.estimate import estimate
    from stagewright.planning.job import Job
    from stagewright.planning.search import plan
    from stagewright.tracing.models.reference import resolve

    cluster, reference = probe("cpu", processes=2), resolve(MODEL, OVERRIDES)
    job = Job(global_batch=MICROBATCHES, sequence_length=LENGTH, dtype="fp32")
    fixed: dict[str, Any] = {"pp": 2, "dp": 1, "microbatch": 1, "schedules": ("1f1b",), "offload": False}
    kept = plan(reference, cluster, job, recompute="none", **fixed).plans[0]
    full = plan(reference, cluster, job, recompute="full", **fixed).plans[0]
    same = {"cuts": kept.cuts, "num_stages": kept.num_stages, "placement": kept.placement}
    found = {"everything kept": kept, "layers": estimate(full.model_copy(update=same), cluster)}
    most = max(rank.reserved_peak_bytes for rank in kept.predictions.ranks)
    for limit in limits:
        limited = job.model_copy(update={"memory_limit": int(limit * most)})
        found[f"within {limit:.0%}"] = plan(reference, cluster, limited, **fixed).plans[0]
    return found


def _peaks(record: Any) -> list[int]:
    return [rank.allocated_peak_bytes for rank in record.ranks]


if __name__ == "__main__":
    main()
