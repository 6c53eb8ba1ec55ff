"""Comparison of two configurations of one model: time, memory, and differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import configuration_of, stage_layers, stage_ranks
from stagewright.report.plans import spare_bytes
from stagewright.units import format_bytes, format_seconds


def differences(yours: Plan, best: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the differences: name, value in `yours`, and value in `best`."""
    for (name, in_yours), (_, in_best) in zip(_choices(yours), _choices(best), strict=True):
        if in_yours != in_best:
            yield name, in_yours, in_best


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
    yield "streamed", str(plan.streamed)
    counts = stage_layers(plan) if num_stages > 1 else None
    yield "layers per stage", ",".join(map(str, counts or ())) or "all"


def side_by_side_lines(yours: Plan, best: Plan, name: str) -> list[str]:
    """Return step and memory of both, and the differences."""
    mine, planned = yours.predictions, best.predictions
    gain = planned.step_seconds / mine.step_seconds - 1
    spare, rank = spare_bytes(yours)
    lacks = f", {format_bytes(-spare)} over the memory of rank {rank}" if spare < 0 else ""
    changes = [f"{what} {in_yours} -> {in_best}" for what, in_yours, in_best in differences(yours, best)]
    return [
        f"{name}: {format_seconds(mine.step_seconds)}, {format_bytes(mine.reserved_peak_bytes)}{lacks}; the plan: "
        f"{format_seconds(planned.step_seconds)} ({gain:+.1%}), {format_bytes(planned.reserved_peak_bytes)}.",
        f"What differs: {'; '.join(changes) or 'nothing'}.",
    ]


def side_by_side_document(yours: Plan, best: Plan, name: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """Return the comparison as ``compared`` of `plan --json`."""
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
            {"what": what, "yours": in_yours, "plan": in_best}
            for what, in_yours, in_best in differences(yours, best)
        ],
        "not_taken": list(notes),
    }
