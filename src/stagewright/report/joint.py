"""What a joint search found, as a document and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagewright.planning.joint.plan import JointPlan
from stagewright.planning.joint.search import Found
from stagewright.report.tables import Table, plural, table
from stagewright.simulation.prediction import Assumptions
from stagewright.units import GIGA, format_bytes, format_seconds

_SHOWN = 6


def joint_document(found: Found, path: Path | None) -> dict[str, Any]:
    """Of `plan-costs --json`: the best plan, the bound, and what it was compared with."""
    plan = found.best
    return {
        "path": None if path is None else str(path),
        "makespan_seconds": plan.makespan_s,
        "lower_bound_seconds": found.bound.seconds,
        "lower_bound": found.bound.why,
        "gap": found.gap,
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
        "runners_up": [_summary(each) for each in found.runners_up[:_SHOWN]],
        "baselines": [_summary(each) for each in found.baselines],
        "search": {"rounds": found.num_rounds, "seconds": found.seconds},
    }  # fmt: skip


def _summary(plan: JointPlan) -> dict[str, Any]:
    return {
        "schedule": plan.name, "num_stages": plan.layout.num_stages, "makespan_seconds": plan.makespan_s,
        "peak_bytes": plan.peak_bytes, "fits": plan.fits,
    }  # fmt: skip


def joint_heading(found: Found) -> str:
    """What the best plan takes, and how far from the bound it is at most."""
    problem = found.best.problem
    return (
        f"{plural(problem.layers.num_layers, 'layer')} on {plural(problem.num_ranks, 'rank')}, "
        f"{problem.num_microbatches} microbatches: {format_seconds(found.best.makespan_s)} per batch, at most "
        f"{found.gap:.1%} above what any plan can reach "
        f"({format_seconds(found.bound.seconds)}: {found.bound.why})"
    )


def assumptions_text(assumed: Assumptions) -> str:
    """What the plan stands on beside the table of costs, and which options say otherwise."""
    if assumed.bytes_per_second is None:
        transfers = "transfers are free, as the table has no boundary_bytes"
    else:
        rate = f"{assumed.bytes_per_second / GIGA:g} GB/s between ranks"
        port = ", one port of 400 Gb/s InfiniBand (--bandwidth)" if assumed.bandwidth == "assumed" else ""
        transfers = f"{rate}{port}, no latency"
    if assumed.memory_limits is None:
        memory = "any amount of memory (--memory-limit)"
    else:
        memory = f"memory of {', '.join(map(format_bytes, dict.fromkeys(assumed.memory_limits)))} per rank"
    speeds = "equal ranks (--speeds)"
    if len(set(assumed.speeds)) > 1:
        speeds = "speeds " + ", ".join(f"{one:.3g}" for one in assumed.speeds)
    return f"Assumed: {transfers}; {memory}; {speeds}; activations held until their weight gradient."


def ranks_table(plan: JointPlan) -> Table:
    """Layers, time and memory of every rank."""
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
    """
    >>> _span(3, 6), _span(3, 4)
    ('3-5', '3')
    """
    return f"{start}" if end == start + 1 else f"{start}-{end - 1}"


def runners_up_table(found: Found) -> Table:
    """The next best plans of each kind and what they lose."""
    rows = []
    seen = {found.best.name}
    for each in found.runners_up:
        if each.name not in seen and len(rows) < _SHOWN:
            seen.add(each.name)
            loss = each.makespan_s / found.best.makespan_s - 1
            rows.append((each.name, each.layout.num_stages, format_seconds(each.makespan_s), f"{loss:+.1%}"))
    return table("Runners-up", ("plan", "stages", "batch", "slower by"), rows)
