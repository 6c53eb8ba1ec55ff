"""Legal cuts of a graph, and the values that cross them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stagewright.graph.graph import OperatorGraph, Part

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """All cuts of a graph, one entry per cut index from 0 to the number of forward operators; the first and last are
    illegal.

    `legal`: no buffer that changes with every microbatch has users on both sides, and a loss in pieces stays whole.
    `num_values`, `value_bytes`: tensors sent forward across the cut, and their bytes.
    `cotangent_bytes`: bytes sent back across it.

    All are for one microbatch and two stages. With more stages a value is sent from stage to stage up to its last user, so
    the figures hold for every cut of a partition.

    Ignores: that several views of one storage can be sent as that storage; each is counted separately.
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
        """Return the entries at `places`."""
        return Cuts(*(getattr(self, column.name)[np.asarray(places)] for column in fields(self)))


def find_cuts(graph: OperatorGraph) -> Cuts:
    """Find the legal cuts of `graph`, and what crosses each cut.

    A value crosses from its maker as far as its last user, forward or backward; a cotangent as far back as
    its first.
    """
    size = len(graph.forward_ids)
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
    """Add `amount` at every cut with position `low` before it and position `high` after it."""
    changes[low + 1] += amount
    changes[high + 1] -= amount


def _journeys(graph: OperatorGraph) -> Iterator[tuple[Part, int, int, int]]:
    """Yield the part of the maker, the lowest and highest position, and the bytes of each value that can cross a cut."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in graph.nodes:
        place = graph.position.get(node.forward)
        if place is not None:
            for value in node.inputs:
                first[value] = min(first.get(value, place), place)
                last[value] = max(last.get(value, place), place)
    for value in first:
        described = graph.values[value]
        if described.node < 0:
            continue
        maker = graph.nodes[described.node]
        place = graph.position.get(maker.forward)
        if place is None:
            continue
        if maker.part is Part.FORWARD and last[value] > place:
            yield maker.part, place, last[value], described.meta.payload_bytes
        elif maker.part is Part.INPUT_GRAD and first[value] < place:
            yield maker.part, first[value], place, described.meta.payload_bytes


def _inseparable(graph: OperatorGraph) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of operators that must stay on one stage: those that share a buffer which changes
    with every microbatch, and those that run with the backward."""
    if graph.late < len(graph.forward_ids):
        yield graph.late, len(graph.forward_ids) - 1
    for buffer, update in graph.mutations:
        maker = graph.position.get(graph.values[update].node)
        if maker is None:
            continue
        users = (graph.nodes[node].forward for node in graph.consumers.get(buffer, ()))
        places = [maker, *(graph.position[user] for user in users if user in graph.position)]
        yield min(places), max(places)
