"""Graphs of one expert-parallel rank: which parameters fewer ranks hold than the rest, and how these are numbered."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.graph.graph import OperatorGraph

EXPERT_GROUP = "ep"
"""The name by which collectives know the ranks of one expert-parallel group, which have some experts each."""

ALL_TO_ALL = "stagewright.all_to_all.default"


@dataclass(frozen=True)
class ExpertParallel:
    """The expert parallelism of a graph.

    `size` ranks have different experts, each an equal number of every layer's; `parameters` are the names of those of which
    a rank has the part of its experts. Neighbours of a group are `stride` ranks apart, and ranks with the same experts
    `spacing`.
    """

    size: int
    stride: int
    parameters: tuple[str, ...]

    @property
    def spacing(self) -> int:
        return self.size * self.stride


def expert_parallelism(graph: OperatorGraph) -> ExpertParallel | None:
    """That of `graph`; None where every rank has all experts."""
    return graph.facts.get("expert_parallel")


def width_fault(size: int, num_holders: int, tp: int, sequence: bool) -> str | None:
    """Why the experts of stages that `num_holders` x `tp` ranks hold cannot be shared out by `size` of them, or None.

    Ranks that split the sequence between layers have different tokens, and so belong to one group; others have the same, and
    share every expert.

    >>> width_fault(8, 4, 2, True), width_fault(4, 4, 2, False)
    (None, None)
    >>> width_fault(8, 4, 2, False)
    'ep 8 does not divide the 4 ranks of dp x cp'
    """
    if size == 1:
        return None
    if not sequence or tp == 1:
        return f"ep {size} does not divide the {num_holders} ranks of dp x cp" if num_holders % size else None
    if size % tp:
        return f"ep {size} is no multiple of tp {tp}, whose ranks have other tokens each where the sequence is split"
    if num_holders * tp % size:
        return f"ep {size} does not divide the {num_holders * tp} ranks of dp x cp x tp"
    return None
