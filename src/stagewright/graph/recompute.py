"""Recomputation in a backward: forward operators that run right before their users, or as often as a schedule names them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stagewright.graph.graph import Node, makers_of
from stagewright.graph.policy import Reruns


def interleaved(nodes: Sequence[Node], extra: Sequence[Node], also: Iterable[int] = ()) -> list[Node]:
    """Return `nodes` in order, with each of `extra` right before the first that needs it, directly or through others of
    `extra`.

    Nodes that only the values `also` need come last; nodes that nothing needs are left out.
    """
    if not extra:
        return list(nodes)
    makers = makers_of(extra)
    merged: list[Node] = []
    done: set[int] = set()

    def make(values: Iterable[int]) -> None:
        for node in sorted(_missing(values, makers, done), key=lambda node: node.id):
            done.add(node.id)
            merged.append(node)

    for node in nodes:
        if not makers.keys().isdisjoint(node.inputs):
            make(node.inputs)
        merged.append(node)
    make(also)
    return merged


def _missing(values: Iterable[int], makers: dict[int, Node], done: set[int]) -> list[Node]:
    """Return the nodes that `values` need and that have not run, each once."""
    missing: dict[int, Node] = {}
    stack = list(values)
    while stack:
        node = makers.get(stack.pop())
        if node is not None and node.id not in done and node.id not in missing:
            missing[node.id] = node
            stack.extend(node.inputs)
    return list(missing.values())


Number = Callable[[int, int | None], int]
"""Function that adds a copy of a forward value, in a new storage (None) or in a given one."""


@dataclass(frozen=True)
class Rerun:
    """The nodes of a backward with recomputation, those of them that run `again`, and the values `taken` from outside it,
    parameters and cotangents included."""

    nodes: list[Node]
    again: list[Node]
    taken: dict[int, None]


def rerunning(
    backward: Sequence[Node],
    forward: Sequence[Node],
    reruns: Reruns,
    operators: Container[int],
    storage: Callable[[int], int],
    number: Number,
    returned: Iterable[int] = (),
) -> Rerun:
    """Return `backward` with operators of `forward` that run again: those that `reruns` names for an operator run in its
    backward, each right before the first node that needs it, or at the end. `operators` are the operators that have a
    backward; nodes that belong to none of them count to the backward around them.

    Results that are computed again are used from then on, instead of those of F or of an earlier run; views follow their
    bases. A value of F that is not used before it is computed again is not kept, and is computed again under its own id.
    Operators with results in a storage of the values `returned` do not run again. `storage` returns the root of a value.
    """
    fixed = {storage(value) for value in returned}
    recomputable = {node.id for node in forward if not any(value in fixed for value in node.outputs)}
    wanted = {operator: recomputable.intersection(others) for operator, others in reruns}
    placeholders = itertools.count(-1, -1)
    trial = _Backward(forward, wanted, operators, storage, lambda value, root: next(placeholders), None)
    trial.run(backward)  # once to find out what is kept, which says whose ids are free
    final = _Backward(forward, wanted, operators, storage, number, frozenset(map(storage, trial.taken)))
    final.run(backward)
    return Rerun(final.nodes, final.again, final.taken)


@dataclass
class _Backward:
    """A backward in the course of being built. `keeps` are the storages from outside that it uses; None if not known yet.

    `_latest` maps a value of the graph to its latest copy, `_roots` does so for storages. `_pending` are operators still to
    run in the current operator's backward. `_times` counts how often a value has been computed again; `_made_from` has the
    counts of the inputs of every operator at its latest run.
    """

    forward: Sequence[Node]
    reruns: Mapping[int, set[int]]
    operators: Container[int]
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
            if node.forward in self.operators and node.forward != current:
                self._finish()
                current = node.forward
                if current not in done:
                    done.add(current)
                    self._pending = {*self.reruns.get(current, ())}
            self._make(node.inputs)
            self.nodes.append(self._followed(self._renamed(node)))
        self._finish()

    def _followed(self, node: Node) -> Node:
        """Return `node` of the backward, with new ids for views of values that have new ids."""
        outputs = list(node.outputs)
        for place, value in enumerate(outputs):
            root = None if value is None else self._roots.get(self.storage(value))
            if value is not None and root is not None:
                outputs[place] = self._latest[value] = self.number(value, root)
        return node if tuple(outputs) == node.outputs else replace(node, outputs=tuple(outputs))

    def _finish(self) -> None:
        """Run the operators that are still pending, ahead of their use."""
        if self._pending:
            pending = [node for node in self.forward if node.id in self._pending]
            self._make([value for node in pending for value in node.outputs if value is not None])
            self._pending = set()

    def _make(self, values: Iterable[int]) -> None:
        """Run again the operators that `values` need."""
        needed: dict[int, Node] = {}
        stack = list(values)
        while stack:
            node = self._makers.get(stack.pop())
            if node is None or node.id in needed:
                continue
            if node.id in self._pending or self._is_view(node):
                needed[node.id] = node
                stack.extend(node.inputs)
        for node in sorted(needed.values(), key=lambda node: node.id):
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
        for value, copy in zip(node.outputs, outputs, strict=True):
            if value is not None and copy is not None:
                self._latest[value] = copy
                self._times[value] = self._times.get(value, 0) + 1
        self.nodes.append(renamed)
        self.again.append(renamed)

    def _named(self, value: int, is_first: bool) -> int:
        """Return the id of `value` when it is computed again: its own if that is still free."""
        root = self.storage(value)
        now = value if root == value else self._roots.get(root, root)
        is_free = self.keeps is not None and root not in self.keeps and now == root
        if is_first and is_free:
            return value
        copy = self.number(value, None if root == value else now)
        if root == value:
            self._roots[root] = copy
        return copy

    def _renamed(self, node: Node) -> Node:
        names: dict[int, int] = {}
        for value in node.inputs:
            latest = self._latest.get(value)
            if latest is None:
                self.taken[value] = None
            elif latest != value:
                names[value] = latest
        return node.renamed(names)
