"""Time, state, saved values and transients of any range of forward operators in O(1), after one pass over the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from stagewright.arrays import Floats, Ints
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph, Part
from stagewright.planning.checkpointing.chain import chain_of
from stagewright.planning.checkpointing.pieces import PieceNetwork, Point


class RangeMaximum:
    """A lookup of the largest entry of any range of an array, in O(1) after O(n log n): tables of ranges whose lengths are
    powers of two.

    >>> most = RangeMaximum(np.array([3.0, 1.0, 2.0]))
    >>> most(1, 3), most(0, 3), most(1, 1)
    (2.0, 3.0, 0.0)
    """

    def __init__(self, values: Floats) -> None:
        self.tables = [values]
        while 2 ** len(self.tables) <= len(values):
            last, step = self.tables[-1], 2 ** (len(self.tables) - 1)
            self.tables.append(np.maximum(last[:-step], last[step:]))

    def __call__(self, start: int, stop: int) -> float:
        """Return the largest of ``values[start:stop]``; 0 for none."""
        if stop <= start:
            return 0.0
        level = int(stop - start).bit_length() - 1
        table = self.tables[level]
        return float(max(table[start], table[stop - (1 << level)]))


@dataclass(frozen=True)
class Recomputable:
    """Saved values that may be recomputed, the cheapest per byte first: position of their maker, bytes and seconds."""

    place: Ints
    num_bytes: Floats
    seconds: Floats

    def within(self, start: int, stop: int) -> Recomputable:
        """Return those whose makers are in a range."""
        inside = (self.place >= start) & (self.place < stop)
        return Recomputable(self.place[inside], self.num_bytes[inside], self.seconds[inside])

    @classmethod
    def sorted(cls, place: ArrayLike, num_bytes: ArrayLike, seconds: ArrayLike) -> Recomputable:
        sizes, costs = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
        order = np.argsort(costs / np.maximum(sizes, 1.0), kind="stable")
        return cls(np.asarray(place, np.int64)[order], sizes[order], costs[order])


@dataclass(frozen=True)
class Ranges:
    """Prefix sums with one entry per cut index, all for one microbatch.

    * `seconds`: forward and backward; `forward_seconds`: the forward's part;
    * `state_bytes`: what a rank keeps of parameters, gradients and optimizer state; `parameter_bytes`: all parameters;
    * `saved_bytes`: kept from forward to backward;
    * `transient_bytes`: per operator, the peak bytes alive besides saved values while it runs;
    * `boundary_bytes`: bytes that cross each cut index, in both directions;
    * `legal`: cut indices where the model may be cut.
    """

    seconds: Floats
    forward_seconds: Floats
    state_bytes: Floats
    parameter_bytes: Floats
    saved_bytes: Floats
    transient_bytes: Floats
    boundary_bytes: Floats
    legal: Ints
    recomputable: Recomputable
    work_bytes: Floats | None = None
    """Per operator, the bytes of recomputed values alive while those of its piece, between two kept values, are used."""

    @property
    def size(self) -> int:
        return len(self.seconds) - 1

    @cached_property
    def most_transient(self) -> RangeMaximum:
        return RangeMaximum(self.transient_bytes)

    def work(self, start: int, stop: int) -> float:
        """Return the bytes by which the most alive besides saved values grows where everything is recomputed."""
        return self.most_with_work(start, stop) - self.most_transient(start, stop)

    @cached_property
    def most_with_work(self) -> RangeMaximum:
        """Maximum bytes alive besides saved values where everything is recomputed."""
        work = np.zeros(self.size) if self.work_bytes is None else self.work_bytes
        return RangeMaximum(self.transient_bytes + work)


def ranges_of(model_costs: RangeCosts) -> Ranges:
    """Return the ranges of a traced model.

    Recomputable pieces are those of the uncut model, each by itself. Ignores: that a cut changes which values are available
    next to it, and pieces of several intervals.
    """
    return Ranges(
        model_costs.seconds,
        model_costs.forward_seconds,
        model_costs.state_bytes,
        model_costs.parameter_bytes,
        model_costs.saved_bytes,
        _transients(model_costs.few)[model_costs.copies.places],
        model_costs.boundary_bytes,
        model_costs.legal_cuts,
        *_recomputable(model_costs),
    )


def _transients(graph: OperatorGraph) -> Floats:
    """Return the bytes alive during the backward of each operator besides saved values and gradient buffers of parameters:
    output gradients and intermediate values.

    One pass over the backward of the uncut model: a value lives from its maker to its last user.
    """
    size = len(graph.forward_ids)
    born, last = np.zeros(len(graph.nodes) + 1), dict[int, int]()
    for node in graph.nodes:
        for value in node.inputs:
            last[graph.values[value].storage] = node.id
    for root, num_bytes in graph.storage_bytes.items():
        maker = graph.values[root].node
        if maker >= 0 and graph.nodes[maker].part in (Part.INPUT_GRAD, Part.WEIGHT_GRAD):
            born[maker] += num_bytes
            born[max(last.get(root, maker), maker) + 1] -= num_bytes
    alive = born.cumsum()
    most = np.zeros(size)
    for node in graph.nodes:
        place = graph.position.get(node.forward)
        if place is not None and node.part in (Part.INPUT_GRAD, Part.WEIGHT_GRAD):
            most[place] = max(most[place], alive[node.id])
    return most


def _recomputable(model_costs: RangeCosts) -> tuple[Recomputable, Floats]:
    """Return what may be recomputed: the edges of each piece's hull of bytes and seconds, divided among the values that each
    edge drops; and per position the bytes alive at once where all of its piece is recomputed."""
    from stagewright.graph.split import split_graph

    (whole,) = split_graph(model_costs.few, [])
    chain = chain_of(StageMemory(whole), model_costs.few_costing)
    position = [model_costs.few.position[node.id] for node in chain.nodes]
    points: dict[tuple[object, ...], tuple[Point, ...]] = {}
    places, sizes, costs = list[int](), list[float](), list[float]()
    work = np.zeros(len(model_costs.few.forward_ids))
    last = len(chain.nodes)
    for start, stop in pairwise(chain.boundaries):
        alike = chain.relative[start:stop], stop == last
        if alike not in points:
            points[alike] = PieceNetwork(chain, start, stop, stop == last).corners()
        corners = points[alike]
        for cheap, dear in pairwise(corners):
            dropped = [
                (position[start + number], chain.storages[root].num_bytes)
                for number in sorted({*dear.ran} - {*cheap.ran})
                for root in chain.outputs[start + number]
                if chain.storages[root].needed
            ]
            whole = sum(num_bytes for _, num_bytes in dropped)
            for place, num_bytes in dropped:
                share = num_bytes / whole
                places.append(place)
                sizes.append(share * (cheap.kept_bytes - dear.kept_bytes))
                costs.append(share * (dear.seconds - cheap.seconds))
        work[position[start] : position[stop - 1] + 1] = corners[-1].work_bytes
    everywhere, which = model_costs.copies.of_places(places)
    recomputable = Recomputable.sorted(everywhere, np.array(sizes)[which], np.array(costs)[which])
    return recomputable, work[model_costs.copies.places]
