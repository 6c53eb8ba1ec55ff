"""Plans as tables and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.estimation.breakdown import Share
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.bubble import Bubble, bubble
from stagewright.planning.predictions import Predictions
from stagewright.planning.ranking import chunks, saves
from stagewright.report.tables import Table, byte_unit, figure, numbered, table, time_unit
from stagewright.text import plural
from stagewright.units import GIB, GIGA, format_bytes, format_seconds

_TIGHT = 0.02
"""Share of a device's memory below which headroom is little."""
_LEAST_SHARE = 0.02
"""Categories below this share of all peaks are combined; waits below this share of the step are not shown."""


MARKS = {
    "R": "recomputes activations",
    "O": "offloads activations to the host",
    "L": "evaluates the loss in slices",
    "H": "keeps optimizer state and step on the host",
    "W": "streams weights from the host",
}
"""What the marks after a schedule mean."""


def marks(plan: Plan) -> str:
    """Return the marks of `MARKS` that apply to a plan."""
    recomputes, offloads = saves(plan)
    applies = {
        "R": recomputes, "O": offloads, "L": plan.loss_pieces > 1, "H": bool(plan.host_optimizer), "W": plan.streamed
    }  # fmt: skip
    return "".join(mark for mark in MARKS if applies[mark])


def marks_legend(plan: Plan) -> str:
    """Return what the marks of a plan mean, empty if it has none."""
    return "; ".join(f"+{mark} {MARKS[mark]}" for mark in marks(plan))


def described_schedule(plan: Plan) -> str:
    """Return the schedule, with the number of stages per rank if there are several, and its marks."""
    of_rank = f" x{count}" if (count := chunks(plan)) > 1 else ""
    return plan.schedule + of_rank + "".join(f" +{mark}" for mark in marks(plan))


def plan_document(plan: Plan, path: Path | None) -> dict[str, Any]:
    """Return one plan of `plan --json`; `path` is the file it was written to."""
    ranks = plan.predictions.ranks
    return {
        "path": None if path is None else str(path),
        **_figures(plan),
        "lower_bound_seconds": plan.predictions.lower_bound_seconds,
        "spare_bytes": spare_bytes(plan)[0],
        "bubble": None if (parts := _bubble(plan)) is None else asdict(parts),
        "host_optimizer": list(plan.host_optimizer),
        "host_bytes_per_node": plan.host_bytes(plan.cluster.load()),
        "loss_pieces": plan.loss_pieces,
        "memory_policy": [p if isinstance(p, str) else p.model_dump() for p in plan.memory_policy],
        "allocated_peak_bytes": max(rank.allocated_peak_bytes for rank in ranks),
        "reserved_peak_bytes": max(rank.reserved_peak_bytes for rank in ranks),
    }


def estimate_document(plan: Plan) -> dict[str, Any]:
    """Return the document of `estimate`: predictions of one configuration, rank by rank."""
    return {
        "model": plan.model.name,
        "settings": plan.model.overrides,
        **_figures(plan),
        "host_bytes_per_node": plan.host_bytes(plan.cluster.load()),
        "ranks": [rank.model_dump(mode="json") for rank in plan.predictions.ranks],
    }


def _figures(plan: Plan) -> dict[str, Any]:
    """Return the configuration and its time."""
    of_step = ("step_seconds", "tokens_per_second", "mfu", "bubble_fraction")
    of_plan = ("dp", "tp", "cp", "ep", "pp", "num_stages", "schedule", "microbatch_size", "num_microbatches")
    return {
        **{name: getattr(plan.predictions, name) for name in of_step},
        "streamed": plan.streamed,
        "host_bound_fraction": plan.host_bound,
        "measured_fraction": plan.predictions.measured_share,
        "mean_step_seconds": plan.mean_step_seconds,
        "mean_tokens_per_second": plan.mean_rate(tokens_per_second),
        "runtime": plan.job.runtime,
        **{name: getattr(plan, name) for name in of_plan},
        "lengths": [
            {
                "sequence_length": length,
                "share": plan.job.shares[length],
                "step_seconds": predictions.step_seconds,
                "tokens_per_second": predictions.tokens_per_second,
                "reserved_peak_bytes": [rank.reserved_peak_bytes for rank in predictions.ranks],
            }
            for length, predictions in (plan.by_length.items() if plan.shorter_lengths else ())
        ],
    }  # fmt: skip


def answer_line(plan: Plan) -> str:
    """Return one sentence: whether the plan fits, MFU, the bubble and its causes, and the distance from the lower bound."""
    spare, rank = spare_bytes(plan)
    fits = f"Fits with {format_bytes(spare)} to spare" if spare >= 0 else f"Lacks {format_bytes(-spare)}"
    predictions = plan.predictions
    parts = [
        f"{fits} on rank {rank}",
        f"MFU {plan.mean_rate(lambda of_length: of_length.mfu):.1%}",
        _bubble_text(plan),
    ]
    if predictions.lower_bound_seconds:
        above = predictions.step_seconds / predictions.lower_bound_seconds - 1
        parts.append(f"{above:.1%} above the lower bound for these degrees")
    return "; ".join(parts) + "."


def _bubble_text(plan: Plan) -> str:
    """Return the bubble, and its parts if there are any."""
    text = f"bubble {plan.predictions.bubble_fraction:.1%}"
    parts_of_bubble = _bubble(plan)
    if parts_of_bubble is None or parts_of_bubble.total < _LEAST_BUBBLE:
        return text
    named = {
        "warm-up": parts_of_bubble.warm_up,
        "imbalance": parts_of_bubble.imbalance,
        "transfers": parts_of_bubble.transfers,
    }
    parts = ", ".join(f"{100 * share:.1f} {name}" for name, share in named.items() if share >= _LEAST_BUBBLE)
    return f"{text}: {parts}" if parts else text


_LEAST_BUBBLE = 0.0005
"""Smaller shares would be shown as 0.0 %."""


def _bubble(plan: Plan) -> Bubble | None:
    costs = plan.predictions.costs
    return None if costs is None or plan.num_stages == 1 else bubble(stage_program(plan), costs)


def overfull_line(plan: Plan) -> str | None:
    """Return which rank lacks memory and how much; None if all fit."""
    spare, rank = spare_bytes(plan)
    if spare >= 0:
        return None
    usable = plan.usable_bytes(plan.cluster.load())[rank]
    return f"Does not fit: rank {rank} lacks {format_bytes(-spare)} beyond the {format_bytes(usable)} that it may use."


def spare_bytes(plan: Plan) -> tuple[int, int]:
    """Return the spare bytes of the rank with least, and its number."""
    limits = plan.usable_bytes(plan.cluster.load())
    spare = {rank.rank: limits[rank.rank] - rank.reserved_peak_bytes for rank in plan.predictions.ranks}
    fullest = min(spare, key=lambda rank: spare[rank])
    return spare[fullest], fullest


def tokens_per_second(predictions: Predictions) -> float:
    return predictions.tokens_per_second


def job_text(plan: Plan) -> str:
    """Return what is trained in a step, in which precision, and under which runtime."""
    job, lora = plan.job, plan.model.lora
    of_tokens = "" if job.unit == "samples" else f" of {', '.join(map(str, job.shares))} tokens"
    adapters = "" if lora is None else f", LoRA of rank {lora.rank}"
    adapters += f" on {lora.base}" if lora is not None and lora.base is not None else ""
    samples = plural(job.global_batch, "sample")
    return f"{samples}{of_tokens} per step, {job.dtype}, {job.optimizer}{adapters}, runtime {job.runtime}"


def job_heading(plan: Plan) -> str:
    """Return the model, cluster and job of a plan."""
    return f"{plan.model.name} on {plan.cluster.name}: {job_text(plan)}"


def estimate_heading(plan: Plan) -> str:
    """Return model and job, the configuration, and its time, a line each."""
    predictions = plan.predictions
    longest = f" of {plan.job.sequence_length} tokens" if plan.shorter_lengths else ""
    microbatches = plural(plan.num_microbatches, "microbatch", "microbatches")
    return (
        f"{job_heading(plan)}\n"
        f"{plan.degrees}, {described_schedule(plan)}, {microbatches} of size {plan.microbatch_size}\n"
        f"step{longest} {format_seconds(predictions.step_seconds)}, "
        f"{predictions.tokens_per_second:,.0f} {plan.job.unit}/s, MFU {predictions.mfu:.1%}, "
        f"bubble {predictions.bubble_fraction:.1%}"
    )


def tight_warnings(plan: Plan) -> list[str]:
    """Return a warning if a plan fits with little to spare, unless a memory limit was given."""
    spare, rank = spare_bytes(plan)
    usable = plan.usable_bytes(plan.cluster.load())[rank]
    if plan.job.memory_limit is not None or plan.job.memory_to_spare or not 0 <= spare < _TIGHT * usable:
        return []
    return [
        f"rank {rank} has only {format_bytes(spare)} of {format_bytes(usable)} to spare, {spare / usable:.1%}: if other "
        f"programs use the device, plan with --memory-limit {(1 - 2 * _TIGHT) * usable / GIB:.1f}GiB"
    ]


def host_memory_line(plan: Plan) -> str | None:
    """Return what a plan keeps in the memory of the hosts; None if it keeps nothing there."""
    num_bytes = plan.host_bytes(plan.cluster.load())
    if not num_bytes:
        return None
    parts = ["weights"] * plan.streamed + ["optimizer state"] * bool(plan.host_optimizer)
    parts += ["offloaded activations"] * saves(plan)[1]
    return f"Host memory: {format_bytes(num_bytes)} per node for {' and '.join(parts)}."


def host_line(plan: Plan) -> str | None:
    """Return for how long devices wait for the host, and what would help; None if they hardly do."""
    if plan.host_bound < _LEAST_SHARE:
        return None
    ways = ["fewer, larger microbatches"] if plan.num_microbatches > 1 else []
    if plan.job.profile.kernels:  # it fuses operators itself
        ways.append("CUDA graphs")
    elif not plan.job.compiled:
        ways.append("--compiled (fewer kernels)")
    remedy = f": {' or '.join(ways)} would help" if ways else ""
    return f"Host-bound: for {plan.host_bound:.0%} of the step devices wait for the host{remedy}."


def profile_line(plan: Plan) -> str | None:
    """Return the fraction of operator time that was measured; None without a profile."""
    if plan.cluster.description is None or not any(
        group.device.profile for group in plan.cluster.description.nodes
    ):
        return None
    share = plan.predictions.measured_share
    note = (
        ""
        if share > 1 - _LEAST_SHARE
        else "; the rest is not in the profile and is estimated from the device's figures"
    )
    return f"Measured: {share:.0%} of the operators' time{note}."


def memory_table(plan: Plan) -> Table:
    """Return each rank's bytes by category at its peak, and its busy time."""
    ranks = plan.predictions.ranks
    categories = dict.fromkeys(
        name
        for rank in ranks
        for name, size in rank.categories.items()
        if size > _LEAST_SHARE * rank.allocated_peak_bytes
    )
    unit, size = byte_unit(rank.reserved_peak_bytes for rank in ranks)
    rows = [
        (
            rank.rank,
            *(figure(rank.categories.get(name, 0), size) for name in categories),
            figure(sum(count for name, count in rank.categories.items() if name not in categories), size),
            figure(rank.allocated_peak_bytes, size), figure(rank.reserved_peak_bytes, size),
            rank.peak_at, format_seconds(rank.busy_seconds),
        )
        for rank in ranks
    ]  # fmt: skip
    names = (*(name.replace("_", " ") for name in categories), "other")
    headings = ("rank", *names, "allocated", "reserved", "at", "busy")
    return table(f"Memory at the peak of each pipeline rank, in {unit}", headings, rows)


def stage_table(plan: Plan) -> Table:
    """Return the cuts and the costs of one microbatch on each stage; equal stages of a rank share a row."""
    stages = plan.predictions.stages
    bytes_name, size = byte_unit(max(stage.parameter_bytes, stage.saved_bytes) for stage in stages)
    time_name, second = time_unit(stage.forward_seconds for stage in stages)
    rows = [
        (
            rank, start, figure(stage.parameter_bytes, size), figure(stage.forward_seconds, second),
            figure(stage.input_grad_seconds, second), figure(stage.weight_grad_seconds, second),
            figure(stage.saved_bytes, size), figure(stage.boundary_bytes, size),
        )
        for rank, start, stage in zip(plan.placement, ["(start)", *plan.cuts], stages, strict=True)
    ]  # fmt: skip
    rows = numbered(rows, alike=lambda row: (row[0], *row[2:]))
    headings = ("stage", "rank", "starts at", "parameters", "F", "I", "W", "saved", "sent")
    title = f"Stages, per microbatch, in {time_name} and {bytes_name}"
    return table(title, headings, rows, text=3)


def lengths_tables(plan: Plan) -> list[Table]:
    """Return a table with a row per sequence length; none if all batches have the same length."""
    if not plan.shorter_lengths:
        return []
    shares = plan.job.shares
    ranks = (rank for predictions in plan.by_length.values() for rank in predictions.ranks)
    unit, size = byte_unit(rank.reserved_peak_bytes for rank in ranks)
    rows = [
        (
            length,
            f"{shares[length]:.0%}",
            format_seconds(predictions.step_seconds),
            f"{predictions.tokens_per_second:,.0f}",
            *(figure(rank.reserved_peak_bytes, size) for rank in predictions.ranks),
        )
        for length, predictions in plan.by_length.items()
    ]
    headings = ("tokens", "of steps", "step", "tokens/s", *(f"rank {rank}" for rank in range(plan.pp)))
    title = f"By length: mean step {format_seconds(plan.mean_step_seconds)}, peaks in {unit}"
    return [table(title, headings, rows)]


def breakdown_table(shares: Sequence[Share], by: str) -> Table:
    """Return one row per share, with its fraction of the total time."""
    total = sum(share.seconds for share in shares) or 1.0
    time_name, time_size = time_unit(share.seconds for share in shares)
    byte_name, byte_size = byte_unit(share.bytes_moved for share in shares)
    rows = [
        (
            share.name,
            share.num_calls,
            figure(share.forward_s, time_size),
            figure(share.backward_s, time_size),
            f"{share.seconds / total:.1%}",
            figure(share.flop, GIGA),
            figure(share.bytes_moved, byte_size),
        )
        for share in shares
    ]
    headings = (by, "calls", f"forward\n{time_name}", f"backward\n{time_name}", "share", "GFLOP", byte_name)
    return table("One microbatch through the whole model", headings, rows)
