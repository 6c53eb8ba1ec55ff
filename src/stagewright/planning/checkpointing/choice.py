"""Choices of what the stages of a pipeline recompute and offload, and the pipelines that result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagewright.estimation.time import Costing
from stagewright.graph import Node, Part
from stagewright.graph.policy import Policy, Reruns
from stagewright.graph.stage import Stage
from stagewright.planning.prediction.staged_model import StagedModel, Variants
from stagewright.schedule import Program
from stagewright.schedule.lower import insert_recomputation

_AHEAD = 4
"""Values to fetch ahead, in sizes of the largest offloaded value: with two, a decoder waits for the link at the end of each
block although the link has time on average; with eight nothing more is gained."""

StageOperator = tuple[int, int]
"""A stage and an operator (id) of its forward."""


@dataclass(frozen=True)
class SavingChoice:
    """The operators whose saved values are recomputed, those whose values are kept to recompute from, and those whose values
    are offloaded. `reruns` are the reruns of some stages, as in their policies."""

    recomputed: frozenset[StageOperator] = field(default_factory=frozenset)
    checkpoints: frozenset[StageOperator] = field(default_factory=frozenset)
    moved: frozenset[StageOperator] = field(default_factory=frozenset)
    reruns: frozenset[tuple[int, Reruns]] = field(default_factory=frozenset)


def saved_roots(stages: Iterable[Stage]) -> dict[StageOperator, tuple[int, ...]]:
    """Return the storages that the backward of stages needs, by the operator that allocated them; the stages were split to
    keep everything.

    Plans name only forward operators of the model, so what depends only on inputs (masks, positions) is left out.
    """
    roots: dict[StageOperator, tuple[int, ...]] = {}
    for stage in stages:
        values, nodes = stage.graph.values, stage.graph.nodes
        for root in dict.fromkeys(stage.value(value).storage for value in stage.saved):
            maker = values[root].node if root < len(values) and root not in stage.inputs else -1
            if maker >= 0 and nodes[maker].part is Part.FORWARD:
                key = stage.index, maker
                roots[key] = (*roots.get(key, ()), root)
    return roots


def policies(
    roots: Mapping[StageOperator, Sequence[int]], choice: SavingChoice, stages: Sequence[Stage]
) -> list[Policy]:
    """Return the policy of every stage under a choice; `roots` are the `saved_roots` of the stages."""
    chosen: list[tuple[set[int], set[int], set[int]]] = [(set(), set(), set()) for _ in stages]
    for key in choice.recomputed:
        chosen[key[0]][0].update(roots[key])
    for place, keys in ((1, choice.moved), (2, choice.checkpoints)):
        for stage, operator in keys:
            chosen[stage][place].update(_outputs(stages[stage], operator))
    reruns = dict(choice.reruns)
    return [
        Policy(
            frozenset(recompute),
            frozenset(offload),
            checkpoints=frozenset(checkpoints),
            fetch_ahead=fetch_ahead(choice, stages[stage]),
            reruns=reruns.get(stage, ()),
        )
        for stage, (recompute, offload, checkpoints) in enumerate(chosen)
    ]


def with_choice(
    variants: Variants,
    roots: Mapping[StageOperator, Sequence[int]],
    choice: SavingChoice,
    program: Program | None = None,
) -> StagedModel:
    """Return the partition with the policies of a choice and the program for them; `program`, by default that of the
    partition, keeps everything."""
    kept = program or variants.staged.program
    stages = {stage for stage, _ in (*choice.recomputed, *choice.moved, *choice.reruns)}
    return variants.under(insert_recomputation(kept, stages), policies(roots, choice, variants.staged.stages))


def fetch_ahead(choice: SavingChoice, stage: Stage) -> int:
    """Return the bytes of a few offloaded values, so that the link stays busy where several are used, or freed, at once."""
    operators = (operator for at, operator in choice.moved if at == stage.index)
    values = (value for operator in operators for value in _outputs(stage, operator))
    return _AHEAD * max((stage.value(value).meta.storage_bytes for value in values), default=0)


def _outputs(stage: Stage, operator: int) -> list[int]:
    return [value for value in stage.graph.nodes[operator].outputs if value is not None]


def operators_of(stage: Stage) -> tuple[Node, ...]:
    """Return the forward operators of a stage, without those that depend only on inputs and copies of buffers."""
    return tuple(node for node in stage.forward.nodes if node.part is Part.FORWARD and node.id >= 0)


def operator_seconds(stage: Stage, nodes: Iterable[Node], costing: Costing) -> list[float]:
    """Return the seconds of operators of a stage's forward: of the device, or of the host if the whole forward keeps it
    busier."""
    device_s, host_s, _ = costing.columns(stage.forward.nodes, stage.value)
    seconds = device_s if device_s.sum() >= host_s.sum() else host_s
    by_operator = dict(zip((node.id for node in stage.forward.nodes), seconds.tolist(), strict=True))
    return [by_operator[node.id] for node in nodes]
