"""Every position where a graph can be cut: whether it may be, and what crosses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stagewright.graph.graph import OperatorGraph, Part

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """One entry per position of the body and one more; the first and the last are no cuts.

    `legal`: no buffer that changes with every microbatch has users on both sides, and a loss in pieces stays whole.
    `num_values`, `value_bytes`: tensors that travel forward across the position, and their bytes.
    `cotangent_bytes`: bytes that travel back across it.

    All are of one microbatch, and of two stages; with more of them a value is sent from stage to stage as
    far as its last user, so the figures hold for every cut of a partition.

    Ignores: that several views of one storage can travel as that storage; here each counts by itself.
    """

    legal: NDArray[np.bool_]
    num_values: Counts
    value_bytes: Counts
    cotangent_bytes: Counts

    @property
    def positions(self) -> Counts:
        """The legal cuts, in order."""
        return np.flatnonzero(self.legal)

    def at(self, places: Sequence[int]) -> Cuts:
        """What is there at each of `places`."""
        return Cuts(*(getattr(self, one.name)[np.asarray(places)] for one in fields(self)))


def find_cuts(graph: OperatorGraph) -> Cuts:
    """What each cut of `graph` means.

    A value crosses from its maker as far as its last user, forward or backward; a cotangent as far back as
    its first.
    """
    size = len(graph.body)
    values, value_bytes, cotangent_bytes, barred = (np.zeros(size + 2, np.int64) for _ in range(4))
    for part, low, high, payload in _journeys(graph):
        if part is Part.FORWARD:
            _add(values, low, high, 1)
            _add(value_bytes, low, high, payload)
        else:
            _add(cotangent_bytes, low, high, payload)
    for low, high in _inseparable(graph):
        _add(barred, low, high, 1)
    sums = [changes.cumsum()[: size + 1] for changes in (values, value_bytes, cotangent_bytes)]
    legal = barred.cumsum()[: size + 1] == 0
    legal[[0, -1]] = False
    return Cuts(legal, *sums)


def _add(changes: Counts, low: int, high: int, amount: int) -> None:
    """Adds `amount` at every cut that has position `low` before it and position `high` behind it."""
    changes[low + 1] += amount
    changes[high + 1] -= amount


def _journeys(graph: OperatorGraph) -> Iterator[tuple[Part, int, int, int]]:
    """Part of the maker, lowest and highest position, and bytes of each value that goes anywhere."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in graph.nodes:
        place = graph.position.get(node.forward)
        if place is not None:
            for value in node.inputs:
                first[value] = min(first.get(value, place), place)
                last[value] = max(last.get(value, place), place)
    for value in first:
        made = graph.values[value]
        if made.node < 0:
            continue
        maker = graph.nodes[made.node]
        place = graph.position.get(maker.forward)
        if place is None:
            continue
        if maker.part is Part.FORWARD and last[value] > place:
            yield maker.part, place, last[value], made.meta.payload_bytes
        elif maker.part is Part.INPUT_GRAD and first[value] < place:
            yield maker.part, first[value], place, made.meta.payload_bytes


def _inseparable(graph: OperatorGraph) -> Iterator[tuple[int, int]]:
    """First and last position of the operators that share a buffer which changes with every microbatch, and of those that
    run with the backward."""
    if graph.late < len(graph.body):
        yield graph.late, len(graph.body) - 1
    for buffer, made in graph.mutations:
        maker = graph.position.get(graph.values[made].node)
        if maker is None:
            continue
        users = (graph.nodes[node].forward for node in graph.consumers.get(buffer, ()))
        places = [maker, *(graph.position[user] for user in users if user in graph.position)]
        yield min(places), max(places)
