"""Plans as tables and documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from stagewright.planning.plan import Plan
from stagewright.planning.search import Found
from stagewright.report.tables import plural, table
from stagewright.units import format_bytes, format_seconds

_HEADINGS = (
    "", "pp x dp", "stages", "microbatches", "schedule", "step", "tokens/s", "MFU", "bubble",
    "peak memory per rank",
)  # fmt: skip


def plan_document(plan: Plan, path: Path | None) -> dict[str, Any]:
    """One plan of `plan --json`; `path` is the file it was written to."""
    predictions = plan.predictions
    return {
        "path": None if path is None else str(path),
        "step_seconds": predictions.step_seconds,
        "lower_bound_seconds": predictions.lower_bound_seconds,
        "tokens_per_second": predictions.tokens_per_second,
        "mfu": predictions.mfu,
        "bubble_fraction": predictions.bubble_fraction,
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "num_stages": plan.num_stages,
        "schedule": plan.schedule,
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": plan.num_microbatches,
        "allocated_peak_bytes": max(rank.allocated_peak_bytes for rank in predictions.ranks),
        "reserved_peak_bytes": max(rank.reserved_peak_bytes for rank in predictions.ranks),
    }


def found_heading(found: Found) -> str:
    """Which model, cluster and job the plans are for."""
    best = found.plans[0]
    job = best.job
    return (
        f"{best.model.name} on {best.cluster.name}: {job.global_batch} samples of {job.sequence_length} tokens "
        f"per step, {job.dtype}, {job.optimizer}"
    )


def left_out(found: Found) -> str:
    """How many configurations are no plan, and for which kind of reason."""
    lacking = sum(one.missing_bytes is not None for one in found.excluded)
    others = len(found.excluded) - lacking
    reasons = [f"{lacking} lack memory"] * (lacking > 0) + [f"{others} for other reasons"] * (others > 0)
    listed = f" ({', '.join(reasons)}; --json lists them)" if reasons else ""
    return f"{plural(len(found.plans), 'configuration')} found; {len(found.excluded)} left out{listed}."


def batch_text(plan: Plan) -> str:
    """How the global batch is shared out."""
    return (
        f"{plan.dp} x {plan.num_microbatches} microbatches of {plan.microbatch_size} are the global batch "
        f"of {plan.job.global_batch}"
    )


def plans_table(plans: Sequence[Plan]) -> Table:
    """The best plans, one a row."""
    rows = [
        (
            number,
            f"{plan.pp} x {plan.dp}",
            plan.num_stages,
            f"{plan.num_microbatches} of {plan.microbatch_size}",
            plan.schedule,
            format_seconds(plan.predictions.step_seconds),
            f"{plan.predictions.tokens_per_second:,.0f}",
            f"{plan.predictions.mfu:.1%}",
            f"{plan.predictions.bubble_fraction:.1%}",
            _range([rank.reserved_peak_bytes for rank in plan.predictions.ranks]),
        )
        for number, plan in enumerate(plans, start=1)
    ]
    return table("", _HEADINGS, rows, text=0)


def estimate_document(plan: Plan) -> dict[str, Any]:
    """What one configuration takes, rank by rank: the document of `estimate`."""
    predictions = plan.predictions
    return {
        "step_seconds": predictions.step_seconds,
        "tokens_per_second": predictions.tokens_per_second,
        "mfu": predictions.mfu,
        "bubble_fraction": predictions.bubble_fraction,
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "num_stages": plan.num_stages,
        "schedule": plan.schedule,
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": plan.num_microbatches,
        "ranks": [rank.model_dump(mode="json") for rank in predictions.ranks],
    }


def estimate_heading(plan: Plan) -> str:
    """The configuration and its time in one line."""
    predictions = plan.predictions
    return (
        f"{plan.model.name} on {plan.cluster.name}: pp {plan.pp} x dp {plan.dp}, {plan.schedule}, "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size}\n"
        f"step {format_seconds(predictions.step_seconds)}, "
        f"{predictions.tokens_per_second:,.0f} tokens/s, MFU {predictions.mfu:.1%}, "
        f"bubble {predictions.bubble_fraction:.1%}"
    )


def memory_table(plan: Plan) -> Table:
    """Each rank's busy time and its bytes by category at the moment of its peak."""
    ranks = plan.predictions.ranks
    categories = list(dict.fromkeys(name for rank in ranks for name in rank.categories))
    rows = [
        (
            rank.rank,
            format_seconds(rank.busy_seconds),
            *(_amount(rank.categories.get(name, 0)) for name in categories),
            format_bytes(rank.allocated_peak_bytes),
            format_bytes(rank.reserved_peak_bytes),
        )
        for rank in ranks
    ]
    headings = ("rank", "busy", *(name.replace("_", " ") for name in categories), "allocated", "reserved")
    return table("Memory at the peak, per pipeline rank", headings, rows)


def stage_table(plan: Plan) -> Table:
    """Where the model is cut and what one microbatch takes on each stage."""
    starts = ["(start)", *plan.cuts]
    rows = [
        (
            index,
            plan.placement[index],
            starts[index],
            stage.stop - stage.start,
            format_bytes(stage.parameter_bytes),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.input_grad_seconds),
            format_seconds(stage.weight_grad_seconds),
            format_bytes(stage.saved_bytes),
            _amount(stage.boundary_bytes),
        )
        for index, stage in enumerate(plan.predictions.stages)
    ]
    headings = ("stage", "rank", "starts at", "operators", "parameters", "F", "I", "W", "saved", "sent")
    return table("Stages, per microbatch", headings, rows, text=3)


def _amount(count: int) -> str:
    return format_bytes(count) if count else ""


def _range(counts: Sequence[int]) -> str:
    """
    >>> _range([3 * 2**30, 4 * 2**30]), _range([2**20, 2**30]), _range([5, 5])
    ('3.00 to 4.00 GiB', '1.0 MiB to 1.00 GiB', '5 B')
    """
    low, high = format_bytes(min(counts)), format_bytes(max(counts))
    if low == high:
        return low
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"
