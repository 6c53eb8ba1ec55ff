"""What the model's own regions of `torch.utils.checkpoint` mean for memory.

* What enters a region is kept, and what is made in it is computed again in the backward: but for what selective
  checkpointing keeps, and for what others need, the backward of an operator outside or another region.
* Operators share the fate of all they make, as in plans. A region within another is part of it and recomputed with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.graph.graph import Node, OperatorGraph, Part
from stagewright.graph.policy import KEEP, Policy


def has_regions(graph: OperatorGraph) -> bool:
    """Whether the model's code checkpoints anything."""
    return any(node.region >= 0 for node in graph.nodes)


def region_policy(graph: OperatorGraph) -> Policy:
    """The policy that the model's own code asks for, of every stage alike; `KEEP` where it has no regions."""
    inside = {node.id for node in graph.nodes if node.region >= 0}
    if not inside:
        return KEEP
    kept = {maker.id for maker in _needed_elsewhere(graph)}
    kept |= {node for node in inside if graph.nodes[node].is_kept}
    return Policy(frozenset(_roots(graph, inside - kept)), checkpoints=frozenset(_roots(graph, kept)))


def _needed_elsewhere(graph: OperatorGraph) -> Iterator[Node]:
    """Makers of what a region needs from outside, and of what is made in one for a backward outside."""
    for node in graph.nodes:
        if node.part < Part.FORWARD:
            continue
        here = graph.nodes[node.forward].region if node.forward >= 0 else -1
        is_backward = node.part is not Part.FORWARD
        for value in node.inputs:
            made_by = graph.values[graph.values[value].storage].node
            maker = graph.nodes[made_by]
            if made_by < 0 or maker.part is not Part.FORWARD or maker.region == here:
                continue
            if maker.region >= 0 if is_backward else here >= 0:
                yield maker


def _roots(graph: OperatorGraph, nodes: set[int]) -> Iterator[int]:
    """The storages that some nodes make."""
    made = (value for node in nodes for value in graph.nodes[node].outputs if value is not None)
    return (value for value in made if graph.values[value].storage == value)
