"""Predicted against measured step times of schedules on two local ranks, with costs from `stagewright probe`.

    python benchmarks/schedule_order.py [--models tiny-llama ...] [--schedules 1f1b ...] [--rounds 12] [--microbatches 8]
        [--hidden 256] [--layers 8] [--sequence-length 128] [--profile] [--json]

Every schedule runs the same model on its own partition, as `stagewright plan` makes it. The processes hold all plans of a
model and take their steps in turn; the machine is probed before and after, and predictions are the mean of both. A profile
is of the machine left alone, so the mean of the faster half of the steps counts. With `--profile` every model's operators
are timed in front of its steps, as `stagewright profile` does, and predictions made with that. Prints the median error
and, of the pairs of schedules of a model whose predictions differ by more than 3 %, how many were measured in that order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import machine

os.environ.setdefault("OMP_NUM_THREADS", "1")

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-v"]
TOLD_APART = 0.03
BAR = 0.08
SECONDS_OF_PROFILE = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["tiny-llama", "tiny-gpt2", "tiny-gemma"])
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="time each model's operators")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for model in options.models for row in measured(model, options)]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    right, pairs = order(rows)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "right": right, "pairs": pairs}, indent=1))
        return
    print(
        f"median error {statistics.median(errors):.1%} (bar {BAR:.0%}), worst {max(errors):.1%}; "
        f"{right} of {pairs} pairs in the predicted order"
    )


def measured(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each schedule."""
    from side_by_side import step_seconds
    from stagewright.execution.probe import probe
    from stagewright.execution.probe_operators import faster_half
    from stagewright.execution.profiling import profile
    from stagewright.planning.estimate import estimate
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan
    from stagewright.planning.search import plan
    from stagewright.tracing.models.reference import resolve

    count = options.microbatches
    job = Job(global_batch=count, sequence_length=options.sequence_length, dtype="fp32")
    reference = resolve(model, _overrides(model, options))
    before = probe("cpu", processes=2)
    table = profile(reference, job, [1], "cpu", 2, SECONDS_OF_PROFILE) if options.profile else None
    before = before.with_profile(table) if table else before
    with tempfile.TemporaryDirectory() as folder:
        plans: list[tuple[str, Path, Plan]] = []
        for name in options.schedules:
            one = plan(reference, before, job, pp=2, microbatch=1, schedules=[name], recompute="none").plans[
                0
            ]
            path = Path(folder) / f"{name}.json"
            one.save(path)
            plans.append((name, path, one))
        seconds = step_seconds([path for _, path, _ in plans], 2, options.rounds)
    after = probe("cpu", processes=2)
    after = after.with_profile(table) if table else after
    rows = []
    for (name, _, one), taken in zip(plans, seconds, strict=True):
        again = estimate(one, after).predictions.step_seconds
        predicted = (one.predictions.step_seconds + again) / 2
        row = {
            "model": model,
            "schedule": name,
            "predicted_s": predicted,
            "measured_s": statistics.fmean(faster_half(taken, float)),
        }
        rows.append(row)
        if not options.json:
            error = predicted / row["measured_s"] - 1
            print(
                f"{model:12} {name:17} predicted {predicted:.3f} s  measured {row['measured_s']:.3f} s  {error:+.1%}",
                flush=True,
            )
    return rows


def _overrides(model: str, options: argparse.Namespace) -> dict[str, object]:
    if model == "tiny-gpt2":
        return {
            "num_hidden_layers": options.layers,
            "n_embd": options.hidden,
            "num_attention_heads": 8,
            "n_positions": options.sequence_length,
        }
    return {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_attention_heads": 8,
        "head_dim": options.hidden // 8,
    }


def order(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of one model that were measured in the predicted order, of those that predictions tell apart."""
    right = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        ratio = one["predicted_s"] / other["predicted_s"]
        if one["model"] == other["model"] and abs(ratio - 1) > TOLD_APART:
            pairs += 1
            right += (ratio > 1) == (one["measured_s"] > other["measured_s"])
    return right, pairs


if __name__ == "__main__":
    main()
