"""Results of a joint search, as a document and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.planning.joint.plan import JointPlan
from stagewright.planning.joint.search import JointResult
from stagewright.report.tables import Table, table
from stagewright.simulation.prediction import Assumptions
from stagewright.text import plural
from stagewright.units import GIGA, format_bytes, format_seconds

_SHOWN = 6


def joint_document(result: JointResult, path: Path | None) -> dict[str, Any]:
    """Return the document of `plan-costs --json`: the best plan, the bound, and the plans it was compared with."""
    plan = result.best
    return {
        "path": None if path is None else str(path),
        "makespan_seconds": plan.makespan_s,
        "lower_bound_seconds": result.bound.seconds,
        "lower_bound": result.bound.why,
        "gap": result.gap,
        "num_stages": plan.layout.num_stages,
        "cuts": list(plan.layout.cuts),
        "rank_of_stage": list(plan.layout.rank_of_stage),
        "schedule": plan.name,
        "num_microbatches": plan.problem.num_microbatches,
        "bubble_fraction": plan.timeline.bubble_fraction,
        "ranks": [
            {"busy_seconds": busy, "idle_seconds": idle, "peak_bytes": peak}
            for busy, idle, peak in zip(
                plan.timeline.busy_s.tolist(), plan.timeline.idle_s.tolist(), plan.timeline.peak_bytes.tolist(), strict=True
            )
        ],
        "runners_up": [_summary(runner_up) for runner_up in result.runners_up[:_SHOWN]],
        "baselines": [_summary(runner_up) for runner_up in result.baselines],
        "search": {"rounds": result.num_rounds, "seconds": result.seconds},
    }  # fmt: skip


def _summary(plan: JointPlan) -> dict[str, Any]:
    return {
        "schedule": plan.name, "num_stages": plan.layout.num_stages, "makespan_seconds": plan.makespan_s,
        "peak_bytes": plan.peak_bytes, "fits": plan.fits,
    }  # fmt: skip


def joint_heading(result: JointResult) -> str:
    """Return the time of the best plan, and its maximum distance from the bound."""
    problem = result.best.problem
    return (
        f"{plural(problem.layers.num_layers, 'layer')} on {plural(problem.num_ranks, 'rank')}, "
        f"{plural(problem.num_microbatches, 'microbatch', 'microbatches')}: "
        f"{format_seconds(result.best.makespan_s)} per batch, at most "
        f"{result.gap:.1%} above what any plan can reach "
        f"({format_seconds(result.bound.seconds)}: {result.bound.why})"
    )


def assumptions_text(assumptions: Assumptions) -> str:
    """Return the assumptions of the plan besides the table of costs, with the options to change them."""
    if assumptions.bytes_per_second is None:
        transfers = "transfers are free, as the table has no boundary_bytes"
    else:
        rate = f"{assumptions.bytes_per_second / GIGA:g} GB/s between ranks"
        port = ", one port of 400 Gb/s InfiniBand (--bandwidth)" if assumptions.bandwidth == "assumed" else ""
        transfers = f"{rate}{port}, no latency"
    if assumptions.memory_limits is None:
        memory = "any amount of memory (--memory-limit)"
    else:
        memory = (
            f"memory of {', '.join(map(format_bytes, dict.fromkeys(assumptions.memory_limits)))} per rank"
        )
    speeds = "equal ranks (--speeds)"
    if len(set(assumptions.speeds)) > 1:
        speeds = "speeds " + ", ".join(f"{speed:.3g}" for speed in assumptions.speeds)
    return f"Assumed: {transfers}; {memory}; {speeds}; activations kept until their weight gradient."


def ranks_table(plan: JointPlan) -> Table:
    """Return layers, time and memory of every rank."""
    timeline = plan.timeline
    rows, starts = [], (0, *plan.layout.cuts)
    for rank in range(timeline.num_ranks):
        stages = plan.layout.placement.stages_of(rank)
        layers = " ".join(_span(starts[stage], plan.layout.ends[stage]) for stage in stages)
        idle = timeline.idle_s[rank] / timeline.makespan_s
        busy, peak = format_seconds(timeline.busy_s[rank]), format_bytes(timeline.peak_bytes[rank])
        rows.append((rank, layers, busy, f"{idle:.1%}", peak))
    return table("Ranks", ("rank", "layers", "busy", "idle", "peak"), rows, text=2)


def _span(start: int, end: int) -> str:
    """Return the layers from `start` up to `end`.

    >>> _span(3, 6), _span(3, 4)
    ('3-5', '3')
    """
    return f"{start}" if end == start + 1 else f"{start}-{end - 1}"


def runners_up_table(result: JointResult) -> Table:
    """Return the next best plan of each kind and its loss."""
    rows = []
    seen = {result.best.name}
    for runner_up in result.runners_up:
        if runner_up.name not in seen and len(rows) < _SHOWN:
            seen.add(runner_up.name)
            loss = runner_up.makespan_s / result.best.makespan_s - 1
            rows.append(
                (
                    runner_up.name,
                    runner_up.layout.num_stages,
                    format_seconds(runner_up.makespan_s),
                    f"{loss:+.1%}",
                )
            )
    return table("Runners-up", ("plan", "stages", "batch", "slower by"), rows)
