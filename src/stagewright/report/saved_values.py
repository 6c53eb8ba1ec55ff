"""Treatment of saved values by the stages of a plan: keep, recompute or offload, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stagewright.planning.loss_pieces import logits_bytes
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.predictions import RankPrediction, StagePrediction
from stagewright.report.tables import Table, byte_unit, figure, numbered, plural, table
from stagewright.schedule.in_flight import in_flight
from stagewright.units import format_bytes, format_seconds

_NAMED = 3
"""Maximum number of modules named per stage; the others are counted."""


def saving_tables(plan: Plan) -> list[Table]:
    """Return what every stage keeps, recomputes and offloads, and the composition of every rank's peak; empty if all stages
    keep everything."""
    if all(policy in ("keep", StagePolicy()) for policy in plan.memory_policy):
        return []
    return [_stages_table(plan), _peaks_table(plan)]


def _stages_table(plan: Plan) -> Table:
    stages = plan.predictions.stages
    unit, size = byte_unit(stage.saved_bytes + stage.recomputed_bytes for stage in stages)
    counts = in_flight(stage_program(plan))
    rows = [
        (
            _reason(plan, index, stage, counts[index]),
            figure(stage.saved_bytes - stage.offloaded_bytes, size),
            figure(stage.recomputed_bytes, size),
            figure(stage.offloaded_bytes, size),
            format_seconds(stage.recompute_seconds) if stage.recompute_seconds else "",
        )
        for index, stage in enumerate(stages)
    ]
    headings = ("stages", "what and why", "kept", "recom-\nputed", "off-\nloaded", "takes")
    title = f"What is saved for the backward, per microbatch, in {unit}"
    return table(title, headings, numbered(rows), text=2)


def _peaks_table(plan: Plan) -> Table:
    """Return the position of every rank's peak, and the bytes alive then."""
    ranks = plan.predictions.ranks
    unit, size = byte_unit(rank.allocated_peak_bytes for rank in ranks)
    rows = []
    for rank in ranks:
        parts = [rank.categories.get(name, 0) for name in ("activations", "recomputed", "transient")]
        other_bytes = rank.allocated_peak_bytes - sum(parts)
        rows.append((_place(rank), *(figure(part, size) for part in (other_bytes, *parts))))
    headings = ("rank", "when", "state,\nbuffers", "saved", "recom-\nputed", "results")
    return table(f"What the peak of every rank is made of, in {unit}", headings, numbered(rows), text=2)


def _place(rank: RankPrediction) -> str:
    if not rank.peak_operator:
        return rank.peak_at
    return f"{rank.peak_at}, {rank.peak_operator.rpartition(':')[0] or rank.peak_operator}"


def loss_lines(plan: Plan) -> list[str]:
    """Return the number of pieces of the loss, and the memory they save; empty if the loss is whole."""
    if plan.loss_pieces == 1:
        return []
    tokens = plan.microbatch_size * plan.job.sequence_length
    whole = logits_bytes(plan.model.reference(), tokens, plan.tp)
    return [
        f"The loss is evaluated in {plan.loss_pieces} pieces (+L), with the backward: logits of {format_bytes(whole)} a "
        f"microbatch, in float32, are there {format_bytes(whole // plan.loss_pieces)} at a time."
    ]


def _reason(plan: Plan, index: int, stage: StagePrediction, count: int) -> str:
    policy = plan.memory_policy[index]
    freed = stage.recomputed_bytes + stage.offloaded_bytes
    if not freed:
        return "all is kept: it fits"
    if policy == "layers":
        return "what enters each layer is kept"
    names = (*policy.recompute, *policy.offload) if isinstance(policy, StagePolicy) else ()
    what = f": {_modules(names)}" if names else ""
    microbatches = plural(count, "microbatch", "microbatches")
    return f"{format_bytes(count * freed)} more for {microbatches} in flight if all were kept{what}"


def _modules(operators: Iterable[str]) -> str:
    """Return the modules whose results are recomputed or offloaded, without layer numbers, the most frequent first.

    >>> _modules(["net.layers.0.mlp:2", "net.layers.1.mlp:2", "net.head:1"])
    'mlp x2, head'
    """
    counts = Counter(_last(name.rpartition(":")[0]) for name in operators)
    shown = [name if count == 1 else f"{name} x{count}" for name, count in counts.most_common(_NAMED)]
    num_others = len(counts) - len(shown)
    return ", ".join([*shown, *([f"{num_others} others"] if num_others > 0 else [])])


def _last(module: str) -> str:
    """Return the last part of a module's path that is not a number."""
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), module) or "(model)"
