"""Expert parallelism of a graph: its degree, the parameters of experts, and the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.graph.graph import OperatorGraph

EXPERT_GROUP = "ep"
"""Name of the expert-parallel group in collectives; each of its ranks holds some of the experts."""

ALL_TO_ALL = "stagewright.all_to_all.default"


@dataclass(frozen=True)
class ExpertParallel:
    """The expert parallelism of a graph.

    Each of `size` ranks holds an equal number of the experts of every layer; `parameters` are the names of the experts'
    parameters, which a rank holds for its own experts. Neighbours in a group are `stride` ranks apart, and ranks with the
    same experts `spacing`.
    """

    size: int
    stride: int
    parameters: tuple[str, ...]

    @property
    def spacing(self) -> int:
        return self.size * self.stride


def expert_parallelism(graph: OperatorGraph) -> ExpertParallel | None:
    """Return the expert parallelism of `graph`; None where every rank has all experts."""
    return graph.facts.get("expert_parallel")


def expert_parallel_fault(size: int, num_holders: int, tp: int, sequence: bool) -> str | None:
    """Return why expert parallelism of `size` does not divide stages held by `num_holders` x `tp` ranks, or None.

    With sequence parallelism, tensor-parallel ranks have different tokens, and so belong to one group; otherwise they have
    the same tokens, and each has a part of every expert.

    >>> expert_parallel_fault(8, 4, 2, True), expert_parallel_fault(4, 4, 2, False)
    (None, None)
    >>> expert_parallel_fault(8, 4, 2, False)
    'ep 8 does not divide the 4 ranks of dp x cp'
    """
    if size == 1:
        return None
    if not sequence or tp == 1:
        return f"ep {size} does not divide the {num_holders} ranks of dp x cp" if num_holders % size else None
    if size % tp:
        return f"ep {size} is not a multiple of tp {tp}, whose ranks have different tokens with sequence parallelism"
    if num_holders * tp % size:
        return f"ep {size} does not divide the {num_holders * tp} ranks of dp x cp x tp"
    return None
