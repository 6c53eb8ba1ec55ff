"""Liveness of values in a stage function, exact to the byte: the rules of the generated code applied to layouts.

A function frees each value after the statement of its last use; a storage is freed with its last value. Views take no
memory. An unused result is allocated and freed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bools, Ints
from stagewright.compiled import compiled
from stagewright.graph import Node
from stagewright.graph.added_nodes import FETCHED
from stagewright.graph.stage import Function, Stage

FREED = -1
"""Marker in place of the bytes of a storage: it is freed."""


@dataclass(frozen=True, eq=False)
class Peak:
    """Peak of bytes above those at entry: bytes `allocated` by the function, `again` of these by forward operators that it
    runs again, less bytes of inputs `released` by then. `operator` is the running operator."""

    above_entry: int
    allocated: int
    released: int
    again: int = 0
    operator: str = ""


@dataclass(frozen=True, eq=False)
class FunctionMemory:
    """Memory of one function, independent of its inputs.

    `allocated[i]` are the bytes that the function has allocated and not freed while statement `i` runs. `last[v]` is the
    statement after which the function releases input `v`: -1 at entry, ``len(allocated)`` if it returns it. `outputs` maps
    each output to its storage: the id of an input, or of a value computed here, whose bytes are in `kept`; an output on a
    resident storage has none.
    """

    inputs: tuple[int, ...]
    allocated: Ints
    last: dict[int, int]
    outputs: dict[int, int]
    kept: dict[int, int]
    events: Ints
    """Rows in order: statement, storage, and its allocated bytes, or `FREED`."""
    again: Ints
    """Bytes of `allocated` that belong to operators that run a second time."""
    recomputed: frozenset[int]
    """Storages that these allocate."""
    nodes: tuple[Node, ...]
    """The statements."""
    _peaks: dict[tuple[tuple[int, int], ...], Peak] = field(default_factory=dict)

    def peak(self, freed: Iterable[tuple[int, int]]) -> Peak:
        """Return the peak if input storages of these (statement of the last use, bytes) are freed."""
        key = tuple(sorted(freed))
        if key not in self._peaks:
            self._peaks[key] = self._highest(key)
        return self._peaks[key]

    def _highest(self, freed: Sequence[tuple[int, int]]) -> Peak:
        if not len(self.allocated):
            return Peak(0, 0, 0)
        released = np.zeros(len(self.allocated) + 1, np.int64)
        for last, num_bytes in freed:
            if last + 1 < len(released):
                released[last + 1] += num_bytes
        released = released.cumsum()[:-1]
        at = int(np.argmax(self.allocated - released))
        return Peak(
            int(self.allocated[at] - released[at]), int(self.allocated[at]), int(released[at]), int(self.again[at]),
            self.nodes[at].name,
        )  # fmt: skip


def function_memory(function: Function, stage: Stage, again: frozenset[int] = frozenset()) -> FunctionMemory:
    """Return the memory of `function` of a stage; values that it uses and that are not among its inputs are always alive.

    The operators (ids) in `again` run a second time.
    """
    nodes = function.nodes
    inputs, input_ends = _listed([node.inputs for node in nodes])
    outputs, output_ends = _listed([node.outputs for node in nodes])
    # Fetched values have a storage of their own, although they are copied into that of another value.
    has_fetched = bool(stage.offloaded)
    fetched = np.array([has_fetched and node.op == FETCHED for node in nodes], np.bool_)
    runs_again = np.array([node.id in again for node in nodes], np.bool_)
    lives = _lives(
        stage.roots, stage.sizes, np.array(function.inputs, np.int64), np.array(function.outputs, np.int64),
        inputs, input_ends, outputs, output_ends, fetched, runs_again,
    )  # fmt: skip
    statements, storages, sizes = lives.events
    homes = zip(function.outputs, lives.homes.tolist(), strict=True)
    return FunctionMemory(
        inputs=function.inputs,
        allocated=lives.allocated,
        last=dict(zip(function.inputs, lives.last.tolist(), strict=True)),
        outputs={value: home for value, home in homes if home >= 0},
        kept=dict(zip(storages[lives.stays].tolist(), sizes[lives.stays].tolist(), strict=True)),
        events=lives.events.T,
        again=lives.again,
        recomputed=frozenset(storages[runs_again[statements] & (sizes != FREED)].tolist()),
        nodes=nodes,
    )


def _listed(groups: Sequence[Sequence[int | None]]) -> tuple[Ints, Ints]:
    """Return the members of `groups` in one array, -1 for None, and where each group begins in it, and one end more."""
    members = list(chain.from_iterable(groups))
    if None in members:
        members = [-1 if value is None else value for value in members]
    ends = np.zeros(len(groups) + 1, np.int64)
    ends[1:] = list(map(len, groups))
    return np.array(members, np.int64), ends.cumsum()


class _Lives(NamedTuple):
    allocated: Ints
    again: Ints
    last: Ints
    """Of every input."""
    homes: Ints
    """Storages of the outputs; negative for resident ones."""
    events: Ints
    """Statements, storages and bytes, one row each."""
    stays: Bools
    """Of every event: whether it allocates what stays alive."""


@compiled
def _lives(
    roots: Ints,
    sizes: Ints,
    function_inputs: Ints,
    function_outputs: Ints,
    inputs: Ints,
    input_ends: Ints,
    outputs: Ints,
    output_ends: Ints,
    is_fetched: Bools,
    runs_again: Bools,
) -> _Lives:
    """Follow every storage through a function; `roots` and `sizes` are the storages and bytes of all values."""
    num_nodes = len(is_fetched)
    # The last statement that uses a value frees it; an unused result is freed by the statement that computes it. A
    # statement frees inputs before results.
    is_used = np.zeros(len(roots), np.bool_)
    input_dies, output_dies = np.zeros(len(inputs), np.bool_), np.zeros(len(outputs), np.bool_)
    for value in function_outputs:
        is_used[value] = True
    for node in range(num_nodes - 1, -1, -1):
        for place in range(output_ends[node], output_ends[node + 1]):
            output_dies[place] = outputs[place] >= 0 and not is_used[outputs[place]]
        for place in range(input_ends[node], input_ends[node + 1]):
            input_dies[place] = not is_used[inputs[place]]
            is_used[inputs[place]] = True
        for place in range(output_ends[node], output_ends[node + 1]):
            if output_dies[place]:
                output_dies[place] = not is_used[outputs[place]]
                is_used[outputs[place]] = True

    # The storage of a value is an input or is made here; values on resident storages have none.
    home = np.full(len(roots), -1, np.int64)
    num_names = np.zeros(len(roots), np.int64)  # of a storage: how many values keep it alive
    born = np.full(len(roots), -1, np.int64)  # of a storage that is alive and was made here: its event
    last_of = np.full(len(roots), -1, np.int64)
    for value in function_inputs:
        if is_used[value]:
            home[value], num_names[value] = value, 1
    allocated, again = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    events = np.empty((3, 2 * len(outputs)), np.int64)
    makes_again = np.zeros(2 * len(outputs), np.bool_)
    num_events = live = live_again = 0
    for node in range(num_nodes):
        for place in range(output_ends[node], output_ends[node + 1]):
            value = outputs[place]
            if value < 0:
                continue
            root = roots[value]
            if root != value or is_fetched[node]:
                base = -1
                for other in range(input_ends[node], input_ends[node + 1]):
                    if roots[inputs[other]] == root:
                        base = inputs[other]
                        break
                if base < 0:
                    for other in range(output_ends[node], output_ends[node + 1]):
                        if outputs[other] == root:  # results of one operator in one storage
                            base = root
                if base >= 0:
                    if home[base] >= 0:
                        home[value] = home[base]
                        num_names[home[base]] += 1
                    continue
            live += sizes[value]
            if runs_again[node]:
                live_again += sizes[value]
            events[0, num_events], events[1, num_events], events[2, num_events] = node, value, sizes[value]
            makes_again[num_events] = runs_again[node]
            home[value], num_names[value], born[value] = value, 1, num_events
            num_events += 1
        allocated[node], again[node] = live, live_again
        num_inputs = input_ends[node + 1] - input_ends[node]
        for number in range(num_inputs + output_ends[node + 1] - output_ends[node]):
            if number < num_inputs:
                place = input_ends[node] + number
                dies, value = input_dies[place], inputs[place]
            else:
                place = output_ends[node] + number - num_inputs
                dies, value = output_dies[place], outputs[place]
            if not dies or home[value] < 0:
                continue
            storage = home[value]
            num_names[storage] -= 1
            if num_names[storage] > 0:
                continue
            if born[storage] < 0:
                last_of[storage] = node
                continue
            num_bytes = events[2, born[storage]]
            live -= num_bytes
            if makes_again[born[storage]]:
                live_again -= num_bytes
            born[storage] = -1
            events[0, num_events], events[1, num_events], events[2, num_events] = node, storage, FREED
            num_events += 1
    for storage in function_inputs:
        if num_names[storage] > 0:
            last_of[storage] = num_nodes
    stays = np.zeros(num_events, np.bool_)
    for event in range(num_events):
        stays[event] = events[2, event] != FREED and born[events[1, event]] == event
    return _Lives(
        allocated,
        again,
        last_of[function_inputs],
        home[function_outputs],
        events[:, :num_events].copy(),
        stays,
    )
