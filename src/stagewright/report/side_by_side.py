"""Two configurations of one model beside each other: what they take, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagewright.planning.configuration import configuration_of, stage_layers, stage_ranks
from stagewright.planning.plan import Plan
from stagewright.report.plans import spare_bytes
from stagewright.units import format_bytes, format_seconds


def differences(yours: Plan, best: Plan) -> Iterator[tuple[str, str, str]]:
    """What is not the same: its name, as `yours` has it, and as `best` has it."""
    for (name, left), (_, right) in zip(_choices(yours), _choices(best), strict=True):
        if left != right:
            yield name, left, right


def _choices(plan: Plan) -> Iterator[tuple[str, str]]:
    for name in ("tp", "sequence_parallel", "cp", "pp", "ep", "dp", "schedule"):
        yield name, str(getattr(plan, name))
    num_stages = len(stage_ranks(plan))
    yield "stages", str(num_stages)
    yield "zero", str(max(plan.sharding))
    yield "microbatch", str(plan.microbatch_size)
    yield "recompute", configuration_of(plan).recompute or "as memory asks"
    yield "reduce_dtype", plan.reduce_dtype or "as gradients"
    yield "shard_size", str(plan.shard_size or "all")
    yield "loss_pieces", str(plan.loss_pieces)
    yield "host_optimizer", str(bool(plan.host_optimizer))
    counts = stage_layers(plan) if num_stages > 1 else None
    yield "layers per stage", ",".join(map(str, counts or ())) or "all"


def side_by_side_lines(yours: Plan, best: Plan, name: str) -> list[str]:
    """Step and memory of both, and what differs."""
    left, right = yours.predictions, best.predictions
    gain = right.step_seconds / left.step_seconds - 1
    spare, rank = spare_bytes(yours)
    lacks = f", which lacks {format_bytes(-spare)} on rank {rank}" if spare < 0 else ""
    found = [f"{what} {one} -> {other}" for what, one, other in differences(yours, best)]
    return [
        f"{name}: {format_seconds(left.step_seconds)}, {format_bytes(left.reserved_peak_bytes)}{lacks}; the plan: "
        f"{format_seconds(right.step_seconds)} ({gain:+.1%}), {format_bytes(right.reserved_peak_bytes)}.",
        f"What differs: {'; '.join(found) or 'nothing'}.",
    ]


def side_by_side_document(yours: Plan, best: Plan, name: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """The same under ``compared`` of `plan --json`."""
    predictions = yours.predictions
    return {
        "file": name,
        "step_seconds": predictions.step_seconds,
        "tokens_per_second": predictions.tokens_per_second,
        "mfu": predictions.mfu,
        "reserved_peak_bytes": predictions.reserved_peak_bytes,
        "spare_bytes": spare_bytes(yours)[0],
        "step_ratio": best.predictions.step_seconds / predictions.step_seconds,
        "differences": [
            {"what": what, "yours": one, "plan": other} for what, one, other in differences(yours, best)
        ],
        "not_taken": list(notes),
    }
