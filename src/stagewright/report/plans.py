"""Plans as tables and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.estimation.breakdown import Share
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.planning.found import Found
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.bubble import Bubble, bubble
from stagewright.planning.predictions import Predictions
from stagewright.planning.promises import usable_bytes
from stagewright.report.tables import Table, byte_unit, figure, numbered, plural, table, time_unit
from stagewright.units import GIGA, format_bytes, format_seconds

_LEAST_SHARE = 0.02
"""Categories that are never more of a peak than this are shown as one; waits that are less of a step are not told."""


def described_schedule(plan: Plan) -> str:
    """The schedule, and whether stages make room by recomputing or offloading (R), the last by a loss in pieces (L), or
    ranks by an optimizer on the host (H)."""
    recomputes = any(policy not in ("keep", StagePolicy()) for policy in plan.memory_policy)
    ways = " +R" * recomputes + " +L" * (plan.loss_pieces > 1) + " +H" * bool(plan.host_optimizer)
    return plan.schedule + ways


def plan_document(plan: Plan, path: Path | None) -> dict[str, Any]:
    """One plan of `plan --json`; `path` is the file it was written to."""
    ranks = plan.predictions.ranks
    return {
        "path": None if path is None else str(path),
        **_figures(plan),
        "lower_bound_seconds": plan.predictions.lower_bound_seconds,
        "spare_bytes": spare_bytes(plan)[0],
        "bubble": None if (found := _bubble(plan)) is None else asdict(found),
        "host_optimizer": list(plan.host_optimizer),
        "loss_pieces": plan.loss_pieces,
        "memory_policy": [p if isinstance(p, str) else p.model_dump() for p in plan.memory_policy],
        "allocated_peak_bytes": max(rank.allocated_peak_bytes for rank in ranks),
        "reserved_peak_bytes": max(rank.reserved_peak_bytes for rank in ranks),
    }


def estimate_document(plan: Plan) -> dict[str, Any]:
    """What one configuration takes, rank by rank: the document of `estimate`."""
    return {
        "model": plan.model.name,
        "settings": plan.model.overrides,
        **_figures(plan),
        "ranks": [rank.model_dump(mode="json") for rank in plan.predictions.ranks],
    }


def _figures(plan: Plan) -> dict[str, Any]:
    """The configuration and its time."""
    of_step = ("step_seconds", "tokens_per_second", "mfu", "bubble_fraction")
    of_plan = ("dp", "tp", "cp", "ep", "pp", "num_stages", "schedule", "microbatch_size", "num_microbatches")
    return {
        **{name: getattr(plan.predictions, name) for name in of_step},
        "host_bound_fraction": plan.host_bound,
        "measured_fraction": plan.predictions.measured_share,
        "mean_step_seconds": plan.mean_step_seconds,
        "mean_tokens_per_second": plan.mean_rate(_tokens),
        "runtime": plan.job.runtime,
        **{name: getattr(plan, name) for name in of_plan},
        "lengths": [
            {
                "sequence_length": length,
                "share": plan.job.shares[length],
                "step_seconds": one.step_seconds,
                "tokens_per_second": one.tokens_per_second,
                "reserved_peak_bytes": [rank.reserved_peak_bytes for rank in one.ranks],
            }
            for length, one in (plan.by_length.items() if plan.shorter_lengths else ())
        ],
    }  # fmt: skip


def counts_samples(plan: Plan) -> bool:
    """Whether its samples are of one piece, such as images, and not of tokens."""
    return tuple(plan.job.shares) == (1,)


def found_heading(found: Found) -> str:
    """Which model, cluster and job the plans are for."""
    best = found.plans[0]
    job = best.job
    lengths = ", ".join(map(str, job.shares))
    of_tokens = "" if counts_samples(best) else f" of {lengths} tokens"
    return (
        f"{best.model.name} on {best.cluster.name}: {job.global_batch} samples{of_tokens} "
        f"per step, {job.dtype}, {job.optimizer}"
    )


def answer_line(plan: Plan) -> str:
    """In a sentence: whether it fits, how busy devices are, why they are idle, and how far from the best it can be."""
    spare, rank = spare_bytes(plan)
    fits = f"Fits with {format_bytes(spare)} to spare" if spare >= 0 else f"Lacks {format_bytes(-spare)}"
    predictions = plan.predictions
    parts = [
        f"{fits} on rank {rank}",
        f"MFU {plan.mean_rate(lambda one: one.mfu):.1%}",
        _bubble_text(plan),
    ]
    if predictions.lower_bound_seconds:
        above = predictions.step_seconds / predictions.lower_bound_seconds - 1
        parts.append(f"{above:.1%} above the lower bound of this width")
    return "; ".join(parts) + "."


def _bubble_text(plan: Plan) -> str:
    """The bubble, and its parts where there are any."""
    text = f"bubble {plan.predictions.bubble_fraction:.1%}"
    found = _bubble(plan)
    if found is None or found.total < _LEAST_BUBBLE:
        return text
    named = {"warm-up": found.warm_up, "imbalance": found.imbalance, "transfers": found.transfers}
    parts = ", ".join(f"{100 * share:.1f} {name}" for name, share in named.items() if share >= _LEAST_BUBBLE)
    return f"{text}: {parts}" if parts else text


_LEAST_BUBBLE = 0.0005
"""Less is 0.0 %."""


def _bubble(plan: Plan) -> Bubble | None:
    costs = plan.predictions.costs
    return None if costs is None or plan.num_stages == 1 else bubble(stage_program(plan), costs)


def spare_bytes(plan: Plan) -> tuple[int, int]:
    """What the fullest rank has left of its device, and its number."""
    limits = usable_bytes(plan, plan.cluster.load())
    left = {one.rank: limits[one.rank] - one.reserved_peak_bytes for one in plan.predictions.ranks}
    fullest = min(left, key=lambda rank: left[rank])
    return left[fullest], fullest


def left_out(found: Found) -> str:
    """How many configurations are no plan, and for which kind of reason."""
    lacking = sum(one.missing_bytes is not None for one in found.excluded)
    others = len(found.excluded) - lacking
    reasons = [f"{lacking} lack memory"] * (lacking > 0) + [f"{others} for other reasons"] * (others > 0)
    listed = f" ({', '.join(reasons)}; --json lists them)" if reasons else ""
    slower = f" {found.num_bounded} more cannot be faster{_promise(found)}." if found.num_bounded else ""
    num_found = plural(len(found.plans), "configuration")
    return f"{num_found} found; {len(found.excluded)} rejected{listed}.{slower}{zero_text(found.plans[0])}"


_SHARDED = ("optimizer state", "gradients and optimizer state", "parameters, gradients and optimizer state")
"""By the level of ZeRO, from 1 on."""


def zero_text(plan: Plan) -> str:
    """What replicas of the plan shard; empty where there is one, or nothing is sharded."""
    levels = sorted({level for level in plan.sharding if level})
    if plan.dp == 1 or not levels:
        return ""
    named = ", ".join(map(str, levels))
    return f" Replicas of the best shard {_SHARDED[levels[-1] - 1]} (ZeRO {named})."


def _promise(found: Found) -> str:
    one = found.next_best
    return (
        ""
        if one is None
        else f" (the nearest by its lower bound, {one.seconds / _best_s(found) - 1:+.1%}: {one.configuration})"
    )


def _best_s(found: Found) -> float:
    return min(plan.predictions.step_seconds for plan in found.plans)


def widths(plan: Plan) -> str:
    """Ranks in the pipeline, replicas and, where there are several, of every other kind."""
    shared = f" x {plan.tp}" if plan.tp > 1 else ""
    return f"{plan.pp} x {plan.dp}{shared}{_more_widths(plan)}"


def _more_widths(plan: Plan) -> str:
    return (f" x cp {plan.cp}" if plan.cp > 1 else "") + (f", ep {plan.ep}" if plan.ep > 1 else "")


def batch_text(plan: Plan) -> str:
    """How the global batch is divided."""
    return (
        f"{plan.dp} x {plan.num_microbatches} microbatches of {plan.microbatch_size} are the global batch "
        f"of {plan.job.global_batch}"
    )


def _tokens(predictions: Predictions) -> float:
    return predictions.tokens_per_second


def plans_table(plans: Sequence[Plan]) -> Table:
    """The best plans, one a row; narrow enough for a terminal of 80 columns.

    With several lengths times are means over all steps, and peaks the longest's.
    """
    peaks = [[rank.reserved_peak_bytes for rank in plan.predictions.ranks] for plan in plans]
    unit, size = byte_unit(count for counts in peaks for count in counts)
    rows = [
        (
            widths(plan), plan.num_stages, f"{plan.num_microbatches} of {plan.microbatch_size}", described_schedule(plan),
            format_seconds(plan.mean_step_seconds), f"{plan.mean_rate(_tokens):,.0f}",
            f"{plan.mean_rate(lambda one: one.mfu):.1%}", f"{plan.mean_rate(lambda one: one.bubble_fraction):.1%}",
            _range(counts, size),
        )
        for plan, counts in zip(plans, peaks, strict=True)
    ]  # fmt: skip
    step = "mean\nstep" if any(plan.shorter_lengths for plan in plans) else "step"
    rate = "samples/s" if plans and counts_samples(plans[0]) else "tokens/s"
    headings = (
        "pp x\ndp", "stages", "micro-\nbatches", "schedule", step, rate, "MFU", "bubble", f"peak {unit}\nper rank",
    )  # fmt: skip
    return table("", headings, rows, text=0)


def estimate_heading(plan: Plan) -> str:
    """The configuration and its time in one line."""
    predictions = plan.predictions
    shared = (f" x tp {plan.tp}" if plan.tp > 1 else "") + _more_widths(plan)
    longest = f" of {plan.job.sequence_length} tokens" if plan.shorter_lengths else ""
    unit = "samples" if counts_samples(plan) else "tokens"
    under = "" if plan.job.runtime == STAGEWRIGHT else f", under {plan.job.runtime}"
    return (
        f"{plan.model.name} on {plan.cluster.name}: pp {plan.pp} x dp {plan.dp}{shared}, {described_schedule(plan)}, "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size}{under}\n"
        f"step{longest} {format_seconds(predictions.step_seconds)}, "
        f"{predictions.tokens_per_second:,.0f} {unit}/s, MFU {predictions.mfu:.1%}, "
        f"bubble {predictions.bubble_fraction:.1%}"
    )


def host_line(plan: Plan) -> str | None:
    """Where the host cannot issue operators as fast as the devices run them: for how long, and what would help."""
    if plan.host_bound < _LEAST_SHARE:
        return None
    ways = ["larger microbatches"] if plan.num_microbatches > 1 else []
    ways += [] if plan.job.compiled else ["--compiled (fewer kernels)"]
    remedy = f": {' or '.join(ways)} would help" if ways else ""
    return (
        f"Host-bound: for {plan.host_bound:.0%} of the step devices wait for operators to be issued{remedy}."
    )


def profile_line(plan: Plan) -> str | None:
    """How much of the operators' time is measured; None where no profile was given."""
    if plan.cluster.description is None or not any(
        group.device.profile for group in plan.cluster.description.nodes
    ):
        return None
    share = plan.predictions.measured_share
    rest = (
        ""
        if share > 1 - _LEAST_SHARE
        else "; the rest is not in the profile and worked out from the device's figures"
    )
    return f"Measured: {share:.0%} of the operators' time{rest}."


def memory_table(plan: Plan) -> Table:
    """Each rank's bytes by category at the moment of its peak, and its busy time."""
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
    """Where the model is cut and what one microbatch takes on each stage; stages alike on a rank are one row."""
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


def _range(counts: Sequence[int], size: float) -> str:
    """
    >>> _range([3 * 2**30, 4 * 2**30], 2**30), _range([5, 5], 1)
    ('3.0-4.0', '5.0')
    """
    low, high = (f"{count / size:.1f}" for count in (min(counts), max(counts)))
    return low if low == high else f"{low}-{high}"


def lengths_tables(plan: Plan) -> list[Table]:
    """A row for each length; no table where all batches have one."""
    if not plan.shorter_lengths:
        return []
    shares = plan.job.shares
    ranks = (rank for one in plan.by_length.values() for rank in one.ranks)
    unit, size = byte_unit(rank.reserved_peak_bytes for rank in ranks)
    rows = [
        (
            length,
            f"{shares[length]:.0%}",
            format_seconds(one.step_seconds),
            f"{one.tokens_per_second:,.0f}",
            *(figure(rank.reserved_peak_bytes, size) for rank in one.ranks),
        )
        for length, one in plan.by_length.items()
    ]
    headings = ("tokens", "of steps", "step", "tokens/s", *(f"rank {rank}" for rank in range(plan.pp)))
    title = f"By length: mean step {format_seconds(plan.mean_step_seconds)}, peaks in {unit}"
    return [table(title, headings, rows)]


def breakdown_table(shares: Sequence[Share], by: str) -> Table:
    """One row per share, and how much of all time it is."""
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
