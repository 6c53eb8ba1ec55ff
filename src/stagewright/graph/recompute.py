"""Operators of the forward that run in a backward: as late as their users allow, or as often as a schedule names them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stagewright.graph.graph import Node, makers_of
from stagewright.graph.policy import Reruns


def woven(nodes: Sequence[Node], extra: Sequence[Node], also: Iterable[int] = ()) -> list[Node]:
    """`nodes` in order, each of `extra` right before the first that needs it, directly or through others of `extra`.

    What only the values `also` need comes last; what nobody needs is left out.
    """
    makers = makers_of(extra)
    merged: list[Node] = []
    done: set[int] = set()

    def make(values: Iterable[int]) -> None:
        for node in sorted(_missing(values, makers, done), key=lambda node: node.id):
            done.add(node.id)
            merged.append(node)

    for node in nodes:
        make(node.inputs)
        merged.append(node)
    make(also)
    return merged


def _missing(values: Iterable[int], makers: dict[int, Node], done: set[int]) -> list[Node]:
    """Nodes that `values` need and that have not run, each once."""
    found: dict[int, Node] = {}
    stack = list(values)
    while stack:
        node = makers.get(stack.pop())
        if node is not None and node.id not in done and node.id not in found:
            found[node.id] = node
            stack.extend(node.inputs)
    return list(found.values())


Number = Callable[[int, int | None], int]
"""A new value like one of the forward, in a storage of its own (None) or in one that is known."""


@dataclass(frozen=True)
class Rerun:
    """The nodes of a backward, those of them that run `again`, and what it takes that it has not made again, parameters and
    cotangents included."""

    nodes: list[Node]
    again: list[Node]
    taken: dict[int, None]


def rerunning(
    backward: Sequence[Node],
    forward: Sequence[Node],
    reruns: Reruns,
    body: Container[int],
    storage: Callable[[int], int],
    number: Number,
    returned: Iterable[int] = (),
) -> Rerun:
    """`backward` with operators of `forward` that run again: those that `reruns` names with an operator (ids) run in its
    backward, each right before the first there that needs it, or at the end of it. `body` are the operators that have a
    backward; what belongs to none of them is part of that around it.

    What runs again is used from then on, instead of what F or an earlier run has made; views follow what they are of. A
    value of F that is not used before it is made again need not be kept, and is made again under its own id. What lies in a
    storage of one of the values `returned` does not run again. `storage` tells the root of a value.
    """
    fixed = {storage(value) for value in returned}
    known = {node.id for node in forward if not any(value in fixed for value in node.outputs)}
    wanted = {one: known.intersection(others) for one, others in reruns}
    placeholders = itertools.count(-1, -1)
    looked = _Backward(forward, wanted, body, storage, lambda value, root: next(placeholders), None)
    looked.run(backward)  # once to find out what is kept, which says whose ids are free
    found = _Backward(forward, wanted, body, storage, number, frozenset(map(storage, looked.taken)))
    found.run(backward)
    return Rerun(found.nodes, found.again, found.taken)


@dataclass
class _Backward:
    """`keeps` are the storages from elsewhere that are used; None where that is to be found out.

    While it runs: `_latest` has the value that stands for one of the graph by now, `_roots` the same for storages;
    `_pending` are operators to run in the backward of the present one; `_times` says how often a value has been made again,
    and `_made_from`, of every operator that has run again, how often what it took had been.
    """

    forward: Sequence[Node]
    reruns: Mapping[int, set[int]]
    body: Container[int]
    storage: Callable[[int], int]
    number: Number
    keeps: frozenset[int] | None
    nodes: list[Node] = field(default_factory=list)
    again: list[Node] = field(default_factory=list)
    taken: dict[int, None] = field(default_factory=dict)
    _latest: dict[int, int] = field(default_factory=dict)
    _roots: dict[int, int] = field(default_factory=dict)
    _pending: set[int] = field(default_factory=set)
    _times: dict[int, int] = field(default_factory=dict)
    _made_from: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def _makers(self) -> dict[int, Node]:
        return makers_of(self.forward)

    def run(self, backward: Sequence[Node]) -> None:
        current, done = -1, set[int]()
        for node in backward:
            if node.forward in self.body and node.forward != current:
                self._finish()
                current = node.forward
                if current not in done:
                    done.add(current)
                    self._pending = {*self.reruns.get(current, ())}
            self._make(node.inputs)
            self.nodes.append(self._followed(self._renamed(node)))
        self._finish()

    def _followed(self, node: Node) -> Node:
        """`node` of the backward, with other ids for views of what has another id by now."""
        outputs = list(node.outputs)
        for place, value in enumerate(outputs):
            root = None if value is None else self._roots.get(self.storage(value))
            if value is not None and root is not None:
                outputs[place] = self._latest[value] = self.number(value, root)
        return node if tuple(outputs) == node.outputs else replace(node, outputs=tuple(outputs))

    def _finish(self) -> None:
        """Makes what is made ahead of its use."""
        if self._pending:
            left = [node for node in self.forward if node.id in self._pending]
            self._make([value for node in left for value in node.outputs if value is not None])
            self._pending = set()

    def _make(self, values: Iterable[int]) -> None:
        """Runs what is to run again before `values` can be used."""
        found: dict[int, Node] = {}
        stack = list(values)
        while stack:
            node = self._makers.get(stack.pop())
            if node is None or node.id in found:
                continue
            if node.id in self._pending or self._is_view(node):
                found[node.id] = node
                stack.extend(node.inputs)
        for node in sorted(found.values(), key=lambda node: node.id):
            if node.id in self._pending or self._is_outdated(node):
                self._run_again(node)

    def _is_view(self, node: Node) -> bool:
        return all(value is None or self.storage(value) != value for value in node.outputs)

    def _is_outdated(self, node: Node) -> bool:
        return self._taken(node) != self._made_from.get(node.id, (0,) * len(node.inputs))

    def _taken(self, node: Node) -> tuple[int, ...]:
        return tuple(self._times.get(value, 0) for value in node.inputs)

    def _run_again(self, node: Node) -> None:
        self._pending.discard(node.id)
        renamed = self._renamed(node)
        is_first = node.id not in self._made_from
        self._made_from[node.id] = self._taken(node)
        outputs = tuple(None if value is None else self._named(value, is_first) for value in node.outputs)
        if outputs != node.outputs:
            renamed = replace(renamed, outputs=outputs)
        for value, made in zip(node.outputs, outputs, strict=True):
            if value is not None and made is not None:
                self._latest[value] = made
                self._times[value] = self._times.get(value, 0) + 1
        self.nodes.append(renamed)
        self.again.append(renamed)

    def _named(self, value: int, is_first: bool) -> int:
        """The id of `value` now that it is made again: its own where that is still free."""
        root = self.storage(value)
        now = value if root == value else self._roots.get(root, root)
        is_free = self.keeps is not None and root not in self.keeps and now == root
        if is_first and is_free:
            return value
        made = self.number(value, None if root == value else now)
        if root == value:
            self._roots[root] = made
        return made

    def _renamed(self, node: Node) -> Node:
        names: dict[int, int] = {}
        for value in node.inputs:
            made = self._latest.get(value)
            if made is None:
                self.taken[value] = None
            elif made != value:
                names[value] = made
        return node.renamed(names)
