"""What the stages of a plan do with the values they save, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.table import Table

from stagewright.planning.candidate import in_flight
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.predictions import StagePrediction
from stagewright.report.tables import byte_unit, figure, table
from stagewright.units import format_bytes, format_seconds

_NAMED = 3
"""Modules named per stage; the others are counted."""


def saving_tables(plan: Plan) -> list[Table]:
    """One table with what every stage keeps, recomputes and offloads; none if all stages keep everything."""
    if all(policy in ("keep", StagePolicy()) for policy in plan.memory_policy):
        return []
    stages = plan.predictions.stages
    unit, size = byte_unit(stage.saved_bytes + stage.recomputed_bytes for stage in stages)
    counts = in_flight(stage_program(plan))
    rows = [
        (
            index,
            _reason(plan, index, stage, counts[index]),
            figure(stage.saved_bytes - stage.offloaded_bytes, size),
            figure(stage.recomputed_bytes, size),
            figure(stage.offloaded_bytes, size),
            format_seconds(stage.recompute_seconds) if stage.recompute_seconds else "",
        )
        for index, stage in enumerate(stages)
    ]
    headings = ("stage", "what and why", "kept", "recom-\nputed", "off-\nloaded", "takes")
    return [table(f"What is saved for the backward, per microbatch, in {unit}", headings, rows, text=2)]


def _reason(plan: Plan, index: int, stage: StagePrediction, count: int) -> str:
    policy = plan.memory_policy[index]
    freed = stage.recomputed_bytes + stage.offloaded_bytes
    if not freed:
        return "all: it fits" if count > 1 else "all: only one microbatch is in flight"
    names = (*policy.recompute, *policy.offload) if isinstance(policy, StagePolicy) else ()
    what = f": {_modules(names)}" if names else ""
    if count == 1:
        return f"one microbatch is in flight, and needs them one after the other{what}"
    return f"{count} microbatches in flight would take {format_bytes((count - 1) * freed)} more{what}"


def _modules(operators: Iterable[str]) -> str:
    """The modules whose results are given up, without the numbers of layers, the most frequent first.

    >>> _modules(["net.layers.0.mlp:2", "net.layers.1.mlp:2", "net.head:1"])
    'mlp x2, head'
    """
    counts = Counter(_last(name.rpartition(":")[0]) for name in operators)
    shown = [name if count == 1 else f"{name} x{count}" for name, count in counts.most_common(_NAMED)]
    others = len(counts) - len(shown)
    return ", ".join([*shown, *([f"{others} others"] if others > 0 else [])])


def _last(module: str) -> str:
    """The last part of a module's path that is no number."""
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), module) or "(model)"
