"""The forward of a stage as a chain of operators, divided into pieces where little is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph import Node
from stagewright.graph.stage import Stage
from stagewright.planning.checkpointing.choice import operator_seconds, operators_of

_WINDOWS = (4, 12, 24, 48, 96, 192)
"""Operators on either side among which a boundary must be the narrowest; windows grow until there are few enough."""

_SHORT = 400
"""Operators above which a chain skips the first window."""

_MOST_BOUNDARIES = 300
"""Maximum number of boundaries of a chain; every interval between them is examined."""

_SMALL = 1 / 64
"""Fraction of the largest storage below which a storage is small."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that one operator of the chain allocates and others use.

    `maker` is the operator's index, `last` that of its last user in the forward (the maker's own if there is none);
    `needed`: whether the backward uses it.
    """

    maker: int
    num_bytes: int
    last: int
    needed: bool


@dataclass(frozen=True)
class Chain:
    """The operators of a stage's forward in order, for one microbatch; operators that depend only on inputs are left out,
    and so are copies of buffers that change, which are kept.

    * `nodes`, `seconds`: per operator;
    * `storages`: by root value, those that operators of the chain allocate;
    * `uses`: the roots of `storages` that every operator reads;
    * `boundaries`: operators before which little is alive, including the first and one past the last;
    * `results`: per operator, the peak bytes of the backward's own results while it is at that operator, less the saved
      values that are freed by then.
    """

    stage: int
    nodes: tuple[Node, ...]
    seconds: tuple[float, ...]
    storages: dict[int, Storage]
    uses: tuple[tuple[int, ...], ...]
    boundaries: tuple[int, ...]
    results: Floats

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The roots of the storages that every operator allocates."""
        by_operator: list[list[int]] = [[] for _ in self.nodes]
        for root, storage in self.storages.items():
            by_operator[storage.maker].append(root)
        return tuple(map(tuple, by_operator))

    @cached_property
    def _seconds_after(self) -> tuple[float, ...]:
        """Seconds from before every operator to the end; one entry more than operators."""
        return tuple(accumulate(reversed(self.seconds), initial=0.0))[::-1]

    def spare_s(self, start: int, stop: int) -> float:
        """Return the seconds that the link has after the operators ``[start, stop)`` for copies that they began: as many as
        they take, and no more than the rest of the forward."""
        return min(sum(self.seconds[start:stop]), self._seconds_after[stop])

    @cached_property
    def shape(self) -> str:
        """A key that is equal for chains that differ only in the numbers of operators and values; a text is hashed once."""
        number = {root: index for index, root in enumerate(self.storages)}
        uses = tuple(tuple(map(number.__getitem__, roots)) for roots in self.uses)
        return repr((self.seconds, [*self.storages.values()], uses, self.boundaries, self.results.tobytes()))

    @cached_property
    def relative(self) -> tuple[tuple[object, ...], ...]:
        """What every operator takes, allocates and uses, with other operators counted from it: equal in equal layers."""
        place = {
            root: (number, index)
            for number, roots in enumerate(self.outputs)
            for index, root in enumerate(roots)
        }

        def allocated(number: int, root: int) -> tuple[object, ...]:
            storage = self.storages[root]
            return storage.num_bytes, storage.needed, storage.last - number

        def used(number: int, root: int) -> tuple[object, ...]:
            maker, index = place[root]
            return number - maker, index, self.storages[root].num_bytes, self.storages[root].needed

        return tuple(
            (
                self.seconds[number],
                *(allocated(number, root) for root in self.outputs[number]),
                None,
                *(used(number, root) for root in self.uses[number]),
            )
            for number in range(len(self.nodes))
        )

    @cached_property
    def needed_before(self) -> Floats:
        """Bytes needed by the backward of the storages allocated before each operator; one entry more than operators."""
        needed = np.zeros(len(self.nodes) + 1)
        for storage in self.storages.values():
            if storage.needed:
                needed[storage.maker + 1] += storage.num_bytes
        return needed.cumsum()

    @property
    def needed_bytes(self) -> float:
        return float(self.needed_before[-1])

    def transient(self, start: int, stop: int) -> float:
        """Return the peak bytes of the backward's own results at the operators ``[start, stop)``, less what it has freed
        there."""
        after = self.needed_bytes - float(self.needed_before[stop])
        return max(0.0, float(self.results[start:stop].max(initial=-np.inf)) + after)


def chain_of(memory: StageMemory, costing: Costing) -> Chain:
    """Return the chain of a stage that was split to keep everything."""
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
        root: Storage(operator, stage.value(root).meta.storage_bytes, last[root], root in needed)
        for root, operator in maker.items()
    }
    return storages, tuple(uses)


def _widths(count: int, storages: dict[int, Storage]) -> Floats:
    """Return the bytes alive before every operator that it or a later one uses, without small storages: statistics that live
    from the beginning would make every later place a little wider."""
    changes = np.zeros(count + 2)
    least = _SMALL * max((storage.num_bytes for storage in storages.values()), default=0)
    for storage in storages.values():
        if storage.last > storage.maker and storage.num_bytes > least:
            changes[storage.maker + 1] += storage.num_bytes
            changes[storage.last + 1] -= storage.num_bytes
    return changes.cumsum()[: count + 1]


def _boundaries(widths: Floats) -> tuple[int, ...]:
    """Return the narrow places; of equally narrow ones with nothing wider between them, only the first."""
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


def narrow_places(widths: Sequence[float] | NDArray[np.number], window: int) -> Ints:
    """Return the cuts with no narrower cut within `window` positions; ends do not count.

    >>> narrow_places([0, 5, 3, 5, 5, 2, 4, 0], 2).tolist()
    [2, 5]
    """
    inside = np.asarray(widths, np.float64)[1:-1]
    if not len(inside):
        return np.array([], np.int64)
    padded = np.pad(inside, window, constant_values=np.inf)
    least = np.lib.stride_tricks.sliding_window_view(padded, 2 * window + 1).min(axis=1)
    return np.flatnonzero(inside <= least) + 1


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
    results = np.full(count, -np.inf)
    for number, node in enumerate(stage.backward.nodes):
        place = index.get(node.forward)
        if place is not None:
            results[place] = max(results[place], float(alive[number]))
    return results
