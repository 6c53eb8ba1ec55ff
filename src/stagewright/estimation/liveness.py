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


def function_memory(function: Function, value: Lookup, again: frozenset[int] = frozenset()) -> FunctionMemory:
    """Return the memory of `function`; values that it uses and that are not among its inputs are always alive.

    `value` describes a value by its id; the operators (ids) in `again` run a second time.
    """
    nodes = function.nodes
    used, dying = _last_uses(function)
    # Value -> its storage, an input's or one that is made here; values on resident storages have none.
    home = {number: number for number in function.inputs if number in used}
    num_names = dict.fromkeys(home, 1)  # storage -> how many values keep it alive
    last = dict.fromkeys(function.inputs, -1)
    kept: dict[int, int] = {}
    recomputed: set[int] = set()
    events: list[tuple[int, int, int]] = []
    live = live_again = 0
    live_at: list[int] = []
    again_at: list[int] = []
    for index, node in enumerate(nodes):
        for output in node.outputs:
            if output is None:
                continue
            described = value(output)
            if described.storage != output or node.op == FETCHED:
                base = _base(node, described.storage, value)
                if base is not None:
                    if base in home:
                        storage = home[output] = home[base]
                        num_names[storage] = num_names.get(storage, 0) + 1
                    continue
            num_bytes = kept[output] = described.meta.storage_bytes
            live += num_bytes
            if node.id in again:
                recomputed.add(output)
                live_again += num_bytes
            events.append((index, output, num_bytes))
            home[output] = output
            num_names[output] = 1
        live_at.append(live)
        again_at.append(live_again)
        for number in dying[index]:
            storage = home.get(number)
            if storage is None:
                continue
            num_names[storage] -= 1
            if num_names[storage]:
                continue
            del num_names[storage]
            if storage in kept:
                num_bytes = kept.pop(storage)
                live -= num_bytes
                live_again -= num_bytes if storage in recomputed else 0
                events.append((index, storage, FREED))
            else:
                last[storage] = index
    for storage in num_names:
        if storage in last:
            last[storage] = len(nodes)
    outputs = {number: home[number] for number in function.outputs if number in home}
    return FunctionMemory(
        function.inputs, np.array(live_at, np.int64), last, outputs, kept, tuple(events),
        np.array(again_at, np.int64), frozenset(recomputed), tuple(node.name for node in nodes),
    )  # fmt: skip


def _last_uses(function: Function) -> tuple[set[int], list[list[int]]]:
    """Return the values that `function` uses or returns, and for every statement those that it is the last to use or that
    nothing uses: inputs before results, each in order."""
    used = set(function.outputs)
    dying: list[list[int]] = []
    for node in reversed(function.nodes):
        ending: list[int] = []
        unused = [number for number in node.outputs if number is not None and number not in used]
        for number in (*node.inputs, *unused):
            if number not in used:
                used.add(number)
                ending.append(number)
        dying.append(ending)
    dying.reverse()
    return used, dying


def _base(node: Node, root: int, value: Lookup) -> int | None:
    """Return the input, or other result, of a view that lies in storage `root`; None if none does."""
    for number in node.inputs:
        if value(number).storage == root:
            return number
    return root if root in node.outputs else None  # results of one operator in one storage
