"""The partition of a graph by its cuts: the stage of every node, the routes of values between stages, buffer updates."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from stagewright.errors import PlanError
from stagewright.graph.graph import Node, OperatorGraph, Part, makers_of


class Routes(NamedTuple):
    """For every stage, the stages that it sends values to, or receives them from, with these values."""

    sent: list[list[tuple[int, list[int]]]]
    received: list[list[tuple[int, list[int]]]]

    @classmethod
    def of(cls, values: dict[tuple[int, int], list[int]], num_stages: int) -> Self:
        """Return the routes of ``(from stage, to stage) -> values``."""
        routes = cls([[] for _ in range(num_stages)], [[] for _ in range(num_stages)])
        for (source, target), sent in sorted(values.items()):
            routes.sent[source].append((target, sent))
            routes.received[target].append((source, sent))
        return routes


class Partition:
    """A graph divided at cuts: stage i holds the forward operators from ``bounds[i]`` to ``bounds[i + 1]``.

    Raises:
        PlanError: `bounds` do not increase, or a cut separates the users of a buffer that changes or a loss in pieces.
    """

    def __init__(self, graph: OperatorGraph, cuts: Sequence[int]) -> None:
        self.graph = graph
        self.bounds = _checked_bounds(graph, cuts)
        pieces = list(itertools.pairwise(self.bounds))
        stage_at = [index for index, (low, high) in enumerate(pieces) for _ in range(low, high)]
        self.stage_of_forward = {node: stage_at[position] for node, position in graph.position.items()}
        self.stage: dict[int, int] = {}  # node -> stage, for F, I and W that belong to one stage
        self.nodes_of: list[list[Node]] = [[] for _ in pieces]
        self.floating: list[Node] = []  # backward of derived values
        for node in graph.nodes:
            stage = self.stage_of_forward.get(node.forward)
            if stage is not None and node.part >= Part.FORWARD:
                self.stage[node.id] = stage
                self.nodes_of[stage].append(node)
            elif node.part is Part.WEIGHT_GRAD:
                self.floating.append(node)
        self.changing = frozenset(buffer for buffer, _ in graph.mutations)
        self.updaters = self._updaters()
        self.forward_routes, self.grad_routes = self._routes()
        self.gradients_of: list[list[int]] = [[] for _ in pieces]
        """Gradients that each stage contributes to."""
        self.floating_of: list[list[Node]] = [[] for _ in pieces]
        """Nodes of `floating` that each stage runs: those that its contributions reach, with what these need, in order."""
        self._share_contributions()

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    # -- crossing values --------------------------------------------------------------------------------------------

    def _routes(self) -> tuple[Routes, Routes]:
        spans = self.graph.spans
        stage_at = np.repeat(np.arange(self.num_stages), np.diff(self.bounds))
        made_in, first, last = stage_at[spans.ends.T]
        forward: dict[tuple[int, int], list[int]] = defaultdict(list)
        backward: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in np.flatnonzero((first != made_in) | (last != made_in)).tolist():
            value, places = spans.values[index]
            origin = int(made_in[index])
            others = set(stage_at[list(places)].tolist()) - {origin}
            part = self.graph.nodes[self.graph.values[value].node].part
            if part is Part.FORWARD:
                for edge in itertools.pairwise([origin, *sorted(others)]):
                    forward[edge].append(value)
            else:
                for edge in itertools.pairwise([origin, *sorted(others, reverse=True)]):
                    backward[edge].append(value)
        return Routes.of(forward, self.num_stages), Routes.of(backward, self.num_stages)

    # -- gradients --------------------------------------------------------------------------------------------------

    def _share_contributions(self) -> None:
        contributions = self.graph.contributions
        # Gradient, or value of a floating node -> the stages whose contributions it has.
        carried: dict[int, set[int]] = {}

        def carriers(value: int) -> set[int]:
            if value not in carried:
                carried[value] = set()
                for node, item in contributions.get(value, ()):
                    stage = self.stage_of_forward.get(node)
                    carried[value] |= carriers(item) if stage is None else {stage}
            return carried[value]

        makers = makers_of(self.floating)
        place = {node.id: index for index, node in enumerate(self.floating)}
        active: list[set[int]] = [set() for _ in self.nodes_of]
        for node in self.floating:
            stages = set[int]().union(*map(carriers, node.inputs))
            carried.update((output, stages) for output in node.outputs if output is not None)
            for stage in stages:
                active[stage].add(node.id)
        for gradient in contributions:
            for stage in carriers(gradient):
                self.gradients_of[stage].append(gradient)
        for needed_ids, nodes in zip(active, self.floating_of, strict=True):
            stack = list(needed_ids)
            while stack:
                needed = (makers.get(value) for value in self.graph.nodes[stack.pop()].inputs)
                fresh = {node.id for node in needed if node is not None} - needed_ids
                needed_ids |= fresh
                stack.extend(fresh)
            nodes += [self.floating[index] for index in sorted(place[node] for node in needed_ids)]

    # -- buffers ----------------------------------------------------------------------------------------------------

    def _updaters(self) -> dict[int, frozenset[int]]:
        """Map each changing buffer to the stages that update it.

        A new value computed by a forward operator exists on one stage, and only that stage may read the buffer. A new value
        computed by the prologue is computed, and applied, on every stage that reads the buffer.
        """
        readers = {buffer: self._readers(buffer) for buffer in self.changing}
        updates = dict(self.graph.mutations)
        updaters: dict[int, frozenset[int]] = {}
        for buffer in sorted(self.changing):
            maker = self.graph.values[updates[buffer]].node
            stages = {self.stage[maker]} if maker in self.stage else readers[buffer] or {self._owner(buffer)}
            updaters[buffer] = frozenset(stages)
        for buffer in sorted(self.changing):
            after = self._prologue_from(buffer)
            users = readers[buffer].union(
                *(updaters[other] for other, value in updates.items() if value in after)
            )
            if users - updaters[buffer]:
                raise PlanError(
                    f"a cut separates the users of buffer '{self.graph.values[buffer].name}', which changes with every "
                    f"microbatch: stages {sorted(users | updaters[buffer])} use it; move the cut"
                )
        return updaters

    def _readers(self, buffer: int) -> set[int]:
        """Return the stages whose nodes use the buffer or a prologue value that depends on it."""
        values = self._prologue_from(buffer)
        nodes = {node for value in values for node in self.graph.consumers.get(value, ())}
        return {self.stage[node] for node in nodes if node in self.stage}

    def _prologue_from(self, buffer: int) -> set[int]:
        """Return the buffer and every prologue value that depends on it."""
        reached = {buffer}
        stack = [buffer]
        while stack:
            for consumer in self.graph.consumers.get(stack.pop(), ()):
                node = self.graph.nodes[consumer]
                fresh = {value for value in node.outputs if value is not None} - reached
                if node.part is Part.PROLOGUE:
                    reached |= fresh
                    stack.extend(fresh)
        return reached

    def _owner(self, buffer: int) -> int:
        """Return the first stage that runs the module a buffer belongs to (stage 0 if none does)."""
        owner = self.graph.values[buffer].name.rpartition(".")[0]
        for stage, nodes in enumerate(self.nodes_of):
            if any(node.part is Part.FORWARD and node.module == owner for node in nodes):
                return stage
        return 0


def _checked_bounds(graph: OperatorGraph, cuts: Sequence[int]) -> list[int]:
    size = len(graph.forward_ids)
    bounds = [0, *cuts, size]
    for low, high in itertools.pairwise(bounds):
        if low >= high:
            raise PlanError(
                f"cuts must increase strictly between 1 and {size - 1} (the model has {size} forward operators), "
                f"got {list(cuts)}"
            )
    if bounds[-2] > graph.late:
        raise PlanError(
            f"a cut at {bounds[-2]} separates the pieces of the loss, which begin at {graph.late}: move it there or before"
        )
    return bounds
