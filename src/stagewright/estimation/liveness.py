"""Liveness of values in a stage function, exact to the byte: the rules of the generated code applied to layouts.

A function frees each value after the statement of its last use; a storage is freed with its last value. Views take no
memory. An unused result is allocated and freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagewright.arrays import Ints
from stagewright.graph import Node, Value
from stagewright.graph.added_nodes import FETCHED
from stagewright.graph.stage import Function

Lookup = Callable[[int], Value]

FREED = -1
"""Marker in place of the bytes of a storage: it is freed."""


@dataclass(frozen=True, eq=False)
class Peak:
    """Peak of bytes above those at entry; `allocated` of them belong to the function itself, and `again` of these to forward
    operators that it runs again. `operator` is the running operator."""

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
    events: tuple[tuple[int, int, int], ...] = ()
    """In order: statement, storage, and its allocated bytes, or `FREED`."""
    again: Ints | None = None
    """Bytes of `allocated` that belong to operators that run a second time."""
    recomputed: frozenset[int] = frozenset()
    """Storages that these allocate."""
    operators: tuple[str, ...] = ()
    """Names of the statements."""
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
        again = 0 if self.again is None else int(self.again[at])
        name = self.operators[at] if self.operators else ""
        return Peak(
            int(self.allocated[at] - released[at]), int(self.allocated[at]), int(released[at]), again, name
        )


def function_memory(
    function: Function, resident: frozenset[int], value: Lookup, again: frozenset[int] = frozenset()
) -> FunctionMemory:
    """Return the memory of `function`, given that the values in `resident` are always alive.

    `value` describes a value by its id; the operators (ids) in `again` run a second time.
    """
    return _LivenessPass(function, resident, value, again).memory()


class _LivenessPass:
    """One pass over the statements of a function that tracks which names keep a storage alive."""

    def __init__(
        self, function: Function, resident: frozenset[int], value: Lookup, again: frozenset[int]
    ) -> None:
        self.function = function
        self.again = again
        self.recomputed: set[int] = set()
        self.live_again = 0
        self.resident = resident
        self.value = value
        self.returned = frozenset(function.outputs)
        self.last_use = {number: i for i, node in enumerate(function.nodes) for number in node.inputs}
        self.home: dict[int, int] = {}  # value -> its storage; values on resident storages have none
        self.names: dict[int, set[int]] = {}  # storage -> values that keep it alive
        self.kept: dict[int, int] = {}  # storage made here and alive -> bytes
        self.last: dict[int, int] = {}
        self.events: list[tuple[int, int, int]] = []
        self.live = 0

    def memory(self) -> FunctionMemory:
        for number in self.function.inputs:
            self.last[number] = -1
            if number in self.last_use or number in self.returned:
                self._name(number, number)
        live: list[int] = []
        again: list[int] = []
        for index, node in enumerate(self.function.nodes):
            for output in node.outputs:
                if output is not None:
                    self._make(output, node, index)
            live.append(self.live)
            again.append(self.live_again)
            for number in dict.fromkeys((*node.inputs, *node.outputs)):
                if number is not None and self.last_use.get(number, index) == index:
                    self._drop(number, index)
        for storage in self.names:
            if storage in self.last:
                self.last[storage] = len(live)
        outputs = {number: self.home[number] for number in self.function.outputs if number in self.home}
        return FunctionMemory(
            self.function.inputs, np.array(live, np.int64), self.last, outputs, dict(self.kept),
            tuple(self.events), np.array(again, np.int64), frozenset(self.recomputed),
            tuple(node.name for node in self.function.nodes),
        )  # fmt: skip

    def _name(self, number: int, storage: int) -> None:
        self.home[number] = storage
        self.names.setdefault(storage, set()).add(number)

    def _make(self, output: int, node: Node, index: int) -> None:
        root = self.value(output).storage
        if root != output or node.op == FETCHED:
            sibling = (root,) if root in node.outputs else ()  # results of one operator in one storage
            for number in (*node.inputs, *sibling):
                if self.value(number).storage == root:
                    if number in self.home:
                        self._name(output, self.home[number])
                    return
        self.kept[output] = self.value(output).meta.storage_bytes
        self.live += self.kept[output]
        if node.id in self.again:
            self.recomputed.add(output)
            self.live_again += self.kept[output]
        self.events.append((index, output, self.kept[output]))
        self._name(output, output)

    def _drop(self, number: int, index: int) -> None:
        storage = self.home.get(number)
        if storage is None or number in self.returned:
            return
        self.names[storage].discard(number)
        if self.names[storage]:
            return
        del self.names[storage]
        if storage in self.kept:
            num_bytes = self.kept.pop(storage)
            self.live -= num_bytes
            self.live_again -= num_bytes if storage in self.recomputed else 0
            self.events.append((index, storage, FREED))
        else:
            self.last[storage] = index
