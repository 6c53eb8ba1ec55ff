"""Treatment of saved values by the stages of a plan: keep, recompute or offload, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stagewright.planning.loss_pieces import logits_bytes
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.predictions import RankPrediction, StagePrediction
from stagewright.report.tables import Table, byte_unit, figure, numbered, table
from stagewright.schedule.in_flight import in_flight
from stagewright.text import plural
from stagewright.units import format_bytes, format_seconds

_ROWS = 8
"""Maximum rows of the summary."""
_RUNS = 3
"""Runs of stage numbers that a row lists."""
_WIDTH = 100
"""Maximum columns of the summary."""
_NAMED = 3
"""Maximum number of modules named per stage; the others are counted."""


def saving_tables(plan: Plan) -> list[Table]:
    """Return what every stage keeps, recomputes and offloads, and the composition of every rank's peak; empty if all stages
    keep everything."""
    if all(policy in ("keep", StagePolicy()) for policy in plan.memory_policy):
        return []
    return [_stages_table(plan), _peaks_table(plan)]


def saving_summary(plan: Plan) -> list[Table]:
    """Return a table of the stages that recompute or offload, with like stages in one row; empty if none does."""
    stages = plan.predictions.stages
    unit, size = byte_unit(stage.saved_bytes + stage.recomputed_bytes for stage in stages)
    sizes = [stage.stop - stage.start for stage in stages]
    by_rank = _groups(plan, list(zip(plan.placement, sizes, strict=True)))
    folded = [_folded(plan, members, size) for members in by_rank]
    groups = by_rank if len(set(folded)) <= _ROWS else _groups(plan, sizes)
    alike: dict[tuple[str, ...], list[int]] = {}
    for members in groups:
        alike.setdefault(_folded(plan, members, size), []).extend(members)
    if not alike:
        return []
    most = sorted(alike, key=lambda row: -sum(stages[index].recomputed_bytes for index in alike[row]))[:_ROWS]
    rows = sorted(((sorted(alike[row]), row) for row in most), key=lambda pair: pair[0])
    hidden = f" ({len(alike) - len(rows)} more: --details)" if len(rows) < len(alike) else ""
    headings = ("stages", "modules", "kept", "recomputed", "offloaded", "takes")
    shown = [(_ranges(members), *row) for members, row in rows]
    title = f"Recomputed or offloaded, per stage and microbatch, in {unit}{hidden}"
    return [replace(table(title, headings, shown, text=2), max_width=_WIDTH)]


def _groups(plan: Plan, keys: Sequence[object]) -> list[list[int]]:
    """Return the stages of equal `keys`, in groups of which a stage recomputes or offloads."""
    groups: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    stages = plan.predictions.stages
    return [
        members
        for members in groups.values()
        if any(stages[index].recomputed_bytes + stages[index].offloaded_bytes for index in members)
    ]


def _folded(plan: Plan, members: Sequence[int], size: float) -> tuple[str, ...]:
    """Return the row of the stages `members`, without their numbers."""
    stages = [plan.predictions.stages[index] for index in members]
    policies = [plan.memory_policy[index] for index in members]
    operators = [
        name
        for policy in policies
        if isinstance(policy, StagePolicy)
        for name in (*policy.recompute, *policy.offload)
    ]
    texts = dict.fromkeys(_OF_POLICIES[policy] for policy in policies if isinstance(policy, str))
    takes = max(stage.recompute_seconds for stage in stages)
    return (
        _modules(dict.fromkeys(map(_module, operators))) if operators else ", ".join(texts),
        _span([stage.saved_bytes - stage.offloaded_bytes for stage in stages], size),
        _span([stage.recomputed_bytes for stage in stages], size),
        _span([stage.offloaded_bytes for stage in stages], size),
        f"up to {format_seconds(takes)}" if takes else "",
    )


_OF_POLICIES = {
    "keep": "what the runtime always recomputes",
    "layers": "all but layer inputs",
    "recompute": "all but stage inputs",
    "selective": "what the runtime selects",
}


def _span(counts: Sequence[int], size: float) -> str:
    """Return the range of `counts` in units of `size`; blank if all are zero.

    >>> _span([0, 2**30], 2**30), _span([2**30, 2**30], 2**30), _span([0], 1)
    ('0-1.00', '1.00', '')
    """
    low, high = (figure(count, size) for count in (min(counts), max(counts)))
    return high if low == high else f"{low or 0}-{high}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with consecutive ones as ranges, shortened after a few.

    >>> _ranges([1, 2, 3, 5, 7, 8]), _ranges([0, 2, 4, 6, 8, 10])
    ('1-3, 5, 7-8', '0, 2, 4, ... 10')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    return ", ".join(texts if len(texts) <= _RUNS else [*texts[:_RUNS], f"... {texts[-1]}"])


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
    return table(f"Memory at the peak of every rank, in {unit}", headings, numbered(rows), text=2)


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
        f"Loss in {plan.loss_pieces} slices: of a microbatch's {format_bytes(whole)} of float32 logits, "
        f"{format_bytes(whole // plan.loss_pieces)} are in memory at a time."
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
    return f"saves {format_bytes(count * freed)} with {microbatches} in flight{what}"


def _modules(operators: Iterable[str]) -> str:
    """Return the modules whose results are recomputed or offloaded, without layer numbers, the most frequent first.

    >>> _modules(["net.layers.0.mlp:2", "net.layers.1.mlp:2", "net.head:1"])
    'mlp x2, head'
    """
    counts = Counter(map(_module, operators))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in counts.most_common(_NAMED)]
    num_others = len(counts) - len(shown)
    return ", ".join([*shown, *([plural(num_others, "other")] if num_others > 0 else [])])


def _module(operator: str) -> str:
    """Return the last part of the path of an operator's module that is not a number."""
    module = operator.rpartition(":")[0] if ":" in operator else operator
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), module) or "(model)"
