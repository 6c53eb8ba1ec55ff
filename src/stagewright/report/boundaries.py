"""What crosses the body of a graph at each position where it may be cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from stagewright.graph import OperatorGraph, Part


@dataclass(frozen=True, slots=True)
class Boundary:
    """A cut before forward operator `position`: the values that travel, and their bytes per microbatch."""

    position: int
    num_tensors: int
    num_bytes: int


def boundaries(graph: OperatorGraph) -> list[Boundary]:
    """Every legal cut of `graph`, in order.

    A value travels as far as its last user, forward or backward. A cut between the users of a buffer that
    changes with every microbatch is not legal.
    """
    size = len(graph.body) + 1
    tensors, num_bytes, blocked = [0] * size, [0] * size, [0] * size
    for value, first, last in _journeys(graph):
        for change, position in ((1, first + 1), (-1, last + 1)):
            tensors[position] += change
            num_bytes[position] += change * graph.values[value].meta.payload_bytes
    for first, last in _inseparable(graph):
        blocked[first + 1] += 1
        blocked[last + 1] -= 1
    sums = zip(*(itertools.accumulate(changes) for changes in (tensors, num_bytes, blocked)), strict=True)
    return [
        Boundary(position, count, total)
        for position, (count, total, barred) in enumerate(sums)
        if 0 < position < size - 1 and not barred
    ]


def _journeys(graph: OperatorGraph) -> list[tuple[int, int, int]]:
    """(value, position of its maker, position of its last user) of forward values with a later user."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        position = graph.position.get(node.forward)
        if position is None or node.part < Part.FORWARD:
            continue
        for value in node.inputs:
            last[value] = max(last.get(value, 0), position)
    found = []
    for node_id in graph.body:
        made_at = graph.position[node_id]
        outputs = graph.nodes[node_id].outputs
        found += [(v, made_at, last[v]) for v in outputs if v is not None and last.get(v, made_at) > made_at]
    return found


def _inseparable(graph: OperatorGraph) -> list[tuple[int, int]]:
    """First and last position of the operators that share a buffer which changes with every microbatch."""
    found = []
    for buffer, made in graph.mutations:
        maker = graph.position.get(graph.values[made].node)
        if maker is None:
            continue
        users = (graph.nodes[node].forward for node in graph.consumers.get(buffer, ()))
        positions = [graph.position[user] for user in users if user in graph.position] + [maker]
        found.append((min(positions), max(positions)))
    return found
