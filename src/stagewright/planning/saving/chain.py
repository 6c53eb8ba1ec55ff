"""The forward of a stage as a chain of operators, and the narrow places between which its pieces lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.arrays import Floats
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph import Node
from stagewright.graph.stage import Stage
from stagewright.planning.saving.anchors import narrow_places
from stagewright.planning.saving.problem import operator_seconds, operators_of

_WINDOWS = (4, 12, 24, 48, 96, 192)
"""Operators to either side among which a boundary must be narrowest; wider windows until there are few enough."""

_SHORT = 400
"""Longer chains are looked at without the first window."""

_MOST_BOUNDARIES = 300
"""Of a chain: what lies between them is looked at for every stretch."""

_SMALL = 1 / 64
"""Of the largest storage."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What one operator of the chain makes and others use.

    `maker` is the operator's index, `last` that of its last user in the forward (the maker's own where there is none);
    `needed`: whether the backward uses it.
    """

    maker: int
    num_bytes: int
    last: int
    needed: bool


@dataclass(frozen=True)
class Chain:
    """The operators of a stage's forward in order, of one microbatch; what depends on inputs alone is left out, and so are
    copies of buffers that change, which are kept.

    * `nodes`, `seconds`: of every operator;
    * `storages`: by root value, those that operators of the chain make;
    * `uses`: the roots of `storages` that every operator takes;
    * `boundaries`: operators in front of which little is alive, the first and one past the last among them;
    * `results`: per operator, the most bytes that the backward's own results take while it is at that operator, less the
      saved values that it is done with by then.
    """

    stage: int
    nodes: tuple[Node, ...]
    seconds: tuple[float, ...]
    storages: dict[int, Storage]
    uses: tuple[tuple[int, ...], ...]
    boundaries: tuple[int, ...]
    results: Floats

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """The roots that every operator makes."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for root, storage in self.storages.items():
            found[storage.maker].append(root)
        return tuple(map(tuple, found))

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """Equal for chains that differ by the numbers of operators and values alone."""
        number = {root: index for index, root in enumerate(self.storages)}
        uses = tuple(tuple(map(number.__getitem__, roots)) for roots in self.uses)
        return self.seconds, tuple(self.storages.values()), uses, self.boundaries, self.results.tobytes()

    @cached_property
    def needed_before(self) -> Floats:
        """Bytes that the backward needs of what the operators in front of each make; one entry more than operators."""
        made = np.zeros(len(self.nodes) + 1)
        for storage in self.storages.values():
            if storage.needed:
                made[storage.maker + 1] += storage.num_bytes
        return made.cumsum()

    @property
    def needed_bytes(self) -> float:
        return float(self.needed_before[-1])

    def transient(self, start: int, stop: int) -> float:
        """The most bytes of the backward's own results while it is at the operators ``[start, stop)``, less what it has
        freed there."""
        after = self.needed_bytes - float(self.needed_before[stop])
        return max(0.0, float(self.results[start:stop].max(initial=-np.inf)) + after)


def chain_of(memory: StageMemory, costing: Costing) -> Chain:
    """The chain of a stage that was split to keep everything."""
    stage = memory.stage
    nodes = operators_of(stage)
    index = {node.id: number for number, node in enumerate(nodes)}
    storages, uses = _storages(stage, nodes)
    widths = _widths(len(nodes), storages)
    return Chain(
        stage.index,
        nodes,
        tuple(operator_seconds(stage, nodes, costing)),
        storages,
        uses,
        _boundaries(widths),
        _results(memory, storages, index, len(nodes)),
    )


def _storages(stage: Stage, nodes: Sequence[Node]) -> tuple[dict[int, Storage], tuple[tuple[int, ...], ...]]:
    needed = {stage.value(value).storage for value in stage.saved}
    maker: dict[int, int] = {}
    last: dict[int, int] = {}
    uses: list[tuple[int, ...]] = []
    for number, node in enumerate(nodes):
        taken = dict.fromkeys(stage.value(value).storage for value in node.inputs)
        uses.append(tuple(root for root in taken if root in maker))
        for root in uses[-1]:
            last[root] = number
        for output in node.outputs:
            if output is not None and stage.value(output).storage == output:
                maker[output] = last[output] = number
    storages = {
        root: Storage(made, stage.value(root).meta.storage_bytes, last[root], root in needed)
        for root, made in maker.items()
    }
    return storages, tuple(uses)


def _widths(count: int, storages: dict[int, Storage]) -> Floats:
    """Bytes alive in front of every operator that it or a later one uses, small storages left out: statistics that are at
    hand from the beginning would make every later place a little narrower."""
    changes = np.zeros(count + 2)
    least = _SMALL * max((storage.num_bytes for storage in storages.values()), default=0)
    for storage in storages.values():
        if storage.last > storage.maker and storage.num_bytes > least:
            changes[storage.maker + 1] += storage.num_bytes
            changes[storage.last + 1] -= storage.num_bytes
    return changes.cumsum()[: count + 1]


def _boundaries(widths: Floats) -> tuple[int, ...]:
    """Of places as narrow as each other with nothing wider between them the first."""
    inside: list[int] = []
    for window in _WINDOWS if len(widths) <= _SHORT else _WINDOWS[1:]:
        places = narrow_places(widths, window).tolist()
        inside = []
        for place in places:
            if not inside or widths[inside[-1] : place].max() > widths[place]:
                inside.append(place)
        if len(inside) <= _MOST_BOUNDARIES:
            break
    return (0, *inside, len(widths) - 1)


def _results(memory: StageMemory, storages: dict[int, Storage], index: dict[int, int], count: int) -> Floats:
    stage = memory.stage
    last: dict[int, int] = {}
    for number, node in enumerate(stage.backward.nodes):
        for value in node.inputs:
            last[stage.value(value).storage] = number
    done = np.zeros(len(stage.backward.nodes) + 1)
    for root, number in last.items():
        if root in storages:
            done[number + 1] += storages[root].num_bytes
    alive = memory.backward.allocated - done.cumsum()[:-1]
    found = np.full(count, -np.inf)
    for number, node in enumerate(stage.backward.nodes):
        place = index.get(node.forward)
        if place is not None:
            found[place] = max(found[place], float(alive[number]))
    return found
