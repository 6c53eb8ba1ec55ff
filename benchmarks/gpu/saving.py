"""Stages that recompute or offload what they save: peaks, and how much longer their passes take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from budget import Row
from stages import Seconds, Setting, Staged, predicted_seconds

from stagewright.graph.carving import carve
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.stage import Stage
from stagewright.planning.prediction.regions import layers_policy
from stagewright.schedule.action import Action
from stagewright.tracing.models.reference import ModelReference

_AHEAD = 4
"""Of the largest offloaded value are on their way at once, as in plans."""


def policies_of(staged: Staged, name: str) -> list[Policy]:
    """Of all stages: ``keep``, ``recompute`` as `plan --recompute full` does, or ``offload N``: each Nth saved value."""
    stages = carve(staged.graph, staged.cuts)
    if name == "keep":
        return [KEEP] * len(stages)
    if name == "recompute":
        return [layers_policy(staged.graph)] * len(stages)
    return [_offloading(stage, int(name.removeprefix("offload "))) for stage in stages]


def _offloading(stage: Stage, every: int) -> Policy:
    values, graph = stage.graph.values, stage.graph
    own = [value for value in stage.saved if values[values[value].storage].node in graph.position]
    roots = list(dict.fromkeys(values[value].storage for value in own))[::every]
    largest = max((stage.held_bytes([root]) for root in roots), default=0)
    return Policy(offload=frozenset(roots), fetch_ahead=_AHEAD * largest) if roots else KEEP


def peaks(setting: Setting, model: ModelReference, names: tuple[str, ...]) -> Iterator[Row | str]:
    """Under one policy after the other."""
    staged = Staged(setting, model)
    for name in names:
        policies = policies_of(staged, name)
        program = staged.saving(policies)
        runner = staged.runner(program, policies)
        yield from staged.peaks(runner, staged.lines(program, policies), f"{model.name}, {name}: ")
        del runner


def overlap(setting: Setting, model: ModelReference, every: int) -> Iterator[Row | str]:
    """By how much all passes of every stage take longer when each `every`-th saved value is offloaded."""
    staged = Staged(setting, model)
    policies = policies_of(staged, f"offload {every}")
    program = staged.saving(policies)
    kept = _by_stage(staged.seconds(staged.runner(staged.whole)))
    moved = staged.seconds(staged.runner(program, policies))
    lines = staged.lines(program, policies)
    for stage, taken in _by_stage(moved).items():
        own = [action for action in moved if Action.parse(action).stage == stage]
        predicted = [sum(predicted_seconds(line, action) for action in own) for line in lines]
        name = f"{model.name}, 1 of {every} offloaded: stage {stage}"
        yield f"{name}: passes s", predicted, taken
        waits = [line.summaries[stage].waits_s for line in lines]
        yield f"{name}: longer by s, predicted as waiting", waits, taken - kept[stage]
        size = lines[0].summaries[stage].offloaded_bytes
        yield f"{name}: {size:.4g} bytes to the host and back"


def _by_stage(seconds: Seconds) -> dict[int, float]:
    total: defaultdict[int, float] = defaultdict(float)
    for action, taken in seconds.items():
        total[Action.parse(action).stage] += taken
    return dict(total)
