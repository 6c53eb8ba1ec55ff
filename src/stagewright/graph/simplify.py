"""Simplification of a freshly built graph: dead and repeated nodes are removed, and nodes put into running order."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Value, makers_of, renumbered

_GROUP = {
    Part.STATIC: 0,
    Part.DERIVED: 1,
    Part.PROLOGUE: 2,
    Part.FORWARD: 2,
    Part.INPUT_GRAD: 3,
    Part.WEIGHT_GRAD: 3,
}
_REPEATABLE = (Part.STATIC, Part.DERIVED, Part.PROLOGUE)


def compact(graph: OperatorGraph) -> OperatorGraph:
    """Return the same computation without dead nodes, no-ops and repeated views, renumbered in running order.

    A view that has the layout of a value already at hand (``detach``, an identity ``view``, a pair of ``t``) is that
    value. Equal nodes of the static, derived and prologue parts are one.
    """
    merged, twins = _merge(_sorted(graph))
    return renumbered_graph(_rehome(_drop_dead(merged), graph, twins))


def _sorted(graph: OperatorGraph) -> OperatorGraph:
    order = sorted(graph.nodes, key=lambda node: (_GROUP[node.part], node.id))
    return replace(graph, nodes=tuple(order))


def _merge(graph: OperatorGraph) -> tuple[OperatorGraph, dict[int, int]]:
    """Return the graph without repeats, and for every merged node of a repeatable part the node that stands for it."""
    distinct = _Distinct(graph.values)
    for node in graph.nodes:
        distinct.add(node)
    names, roots = distinct.names, distinct.roots
    merged = replace(
        graph,
        nodes=tuple(distinct.kept),
        values=tuple(
            replace(value, storage=roots[value.storage]) if value.storage in roots else value
            for value in graph.values
        ),
        loss=names.get(graph.loss, graph.loss),
        gradients={  # that of a view which is its parameter goes into the parameter's own
            **{names.get(value, value): gradient for value, gradient in graph.gradients.items()},
            **{value: gradient for value, gradient in graph.gradients.items() if value not in names},
        },
        contributions={
            gradient: tuple((node, names.get(value, value)) for node, value in parts)
            for gradient, parts in graph.contributions.items()
        },
        mutations=tuple((buffer, names.get(value, value)) for buffer, value in graph.mutations),
    )
    return merged, distinct.twins


class _Distinct:
    """Nodes without repeats, added in running order.

    * `names`: the value that stands for each value of a repeat;
    * `roots`: the storage that stands for each storage of a repeat;
    * `twins`: the node that stands for each repeat, -1 where that is a source.
    """

    def __init__(self, values: Sequence[Value]) -> None:
        self.kept: list[Node] = []
        self.names: dict[int, int] = {}
        self.roots: dict[int, int] = {}
        self.twins: dict[int, int] = {}
        self._values = values
        self._equal: dict[Any, Node] = {}
        self._producer: dict[int, int] = {}
        self._views = {
            self._layout(value.id): value.id for value in values if value.origin is not Origin.NODE
        }

    def add(self, node: Node) -> None:
        node = node.renamed(self.names)
        if self._is_equal(node) or self._is_at_hand(node):
            return
        results = [value for value in node.outputs if value is not None]
        for value in results:
            self._views.setdefault(self._key(node, value), value)
        self.kept.append(node)
        self._producer.update(dict.fromkeys(results, node.id))

    def _is_equal(self, node: Node) -> bool:
        """Whether another node of a repeatable part does the same, and so stands for `node`."""
        if node.part not in _REPEATABLE or node.draw >= 0:
            return False
        twin = self._equal.setdefault((node.part, node.op, node.args, node.kwargs), node)
        if twin is node:
            return False
        self.twins[node.id] = twin.id
        for mine, theirs in zip(node.outputs, twin.outputs, strict=True):
            if mine is not None and theirs is not None:
                self.names[mine] = self.names.get(theirs, theirs)
                if self._values[mine].storage == mine:
                    self.roots[mine] = theirs
        return True

    def _is_at_hand(self, node: Node) -> bool:
        """Whether an equal view of the result of `node` exists already, and so stands for it."""
        output = node.outputs[0] if len(node.outputs) == 1 else None
        if output is None or self._values[output].storage == output:
            return False
        layout = self._layout(output)
        candidates = (value for value in node.inputs if self._layout(value) == layout)
        same_view = next(candidates, None)
        if same_view is None:
            same_view = self._same_view(node, layout)
        if same_view is None:
            return False
        self.names[output] = same_view
        self.twins[node.id] = self._producer.get(same_view, -1)
        return True

    def _same_view(self, node: Node, layout: Any) -> int | None:
        """Return a value with this layout that exists wherever `node` runs."""
        if node.part < Part.INPUT_GRAD:
            return self._views.get(layout)
        for key in ((node.forward, Part.INPUT_GRAD, *layout), (node.forward, node.part, *layout), layout):
            view = self._views.get(key)
            if view is not None and (key is not layout or self._producer.get(view, -1) <= node.forward):
                return view
        return None

    def _layout(self, value: int) -> Any:
        described = self._values[value]
        return self.roots.get(described.storage, described.storage), described.meta

    def _key(self, node: Node, value: int) -> Any:
        """Return the layout of a value, and where it exists: everywhere, or in the backward of one forward node."""
        layout = self._layout(value)
        return layout if node.part < Part.INPUT_GRAD else (node.forward, node.part, *layout)


def _rehome(graph: OperatorGraph, original: OperatorGraph, twins: dict[int, int]) -> OperatorGraph:
    """Reassign the backward of removed operators: to the surviving forward operator before a removed one, so that the
    backward stays between the same cuts; to the twin of a derived one, or -1."""
    alive = {node.id for node in graph.nodes}
    forward = sorted(node.id for node in graph.nodes if node.part is Part.FORWARD)
    part = {node.id: node.part for node in original.nodes}

    def home(node: int) -> int:
        if node in alive:
            return node
        if part[node] is Part.FORWARD:
            return forward[max(bisect.bisect_left(forward, node) - 1, 0)]
        twin = twins.get(node, -1)
        return twin if twin in alive and part[twin] is Part.DERIVED else -1

    return replace(
        graph,
        nodes=tuple(replace(node, forward=home(node.forward)) for node in graph.nodes),
        contributions={
            gradient: tuple((home(node), value) for node, value in parts)
            for gradient, parts in graph.contributions.items()
        },
    )


def _drop_dead(graph: OperatorGraph) -> OperatorGraph:
    producer = makers_of(graph.nodes)
    alive: set[int] = set()
    stack = [graph.loss, *(value for _, value in graph.mutations)]
    stack += [value for parts in graph.contributions.values() for _, value in parts]
    while stack:
        node = producer.get(stack.pop())
        if node is not None and node.id not in alive:
            alive.add(node.id)
            stack.extend(node.inputs)
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.id in alive))


def renumbered_graph(graph: OperatorGraph) -> OperatorGraph:
    node_ids = {node.id: index for index, node in enumerate(graph.nodes)}
    used = {value for node in graph.nodes for value in (*node.inputs, *node.outputs) if value is not None}
    used |= {
        graph.loss,
        graph.seed,
        *graph.parameters.values(),
        *graph.buffers.values(),
        *graph.inputs.values(),
    }
    used |= {value for parts in graph.contributions.values() for _, value in parts}
    used |= {*graph.contributions, *graph.gradients, *(value for pair in graph.mutations for value in pair)}
    used |= {graph.values[value].storage for value in used}
    names = {value: index for index, value in enumerate(sorted(used))}
    producer = {output: node.id for node in graph.nodes for output in node.outputs if output is not None}
    signatures: dict[int, int] = {}

    def numbered(node: Node) -> Node:
        inputs = tuple([names[value] for value in node.inputs])
        is_same = inputs == node.inputs
        return Node(
            node_ids[node.id],
            node.op,
            node.args if is_same else renumbered(node.args, names.__getitem__),
            node.kwargs if is_same else renumbered(node.kwargs, names.__getitem__),
            inputs,
            tuple([None if value is None else names[value] for value in node.outputs]),
            node.part,
            node_ids.get(node.forward, -1),
            node.module,
            node.ordinal,
            signatures.setdefault(node.signature, len(signatures)),
            node.draw,
            node.where,
            node.region,
            node.is_kept,
        )

    def numbered_value(index: int, value: Value) -> Value:
        storage, node = names[value.storage], node_ids[producer[value.id]] if value.id in producer else -1
        return Value(index, value.meta, storage, value.origin, value.name, node, value.needs_grad)

    nodes = tuple(map(numbered, graph.nodes))
    values = tuple([numbered_value(index, graph.values[value]) for value, index in names.items()])
    return replace(
        graph,
        values=values,
        nodes=nodes,
        parameters={name: names[value] for name, value in graph.parameters.items()},
        buffers={name: names[value] for name, value in graph.buffers.items()},
        inputs={name: names[value] for name, value in graph.inputs.items()},
        loss=names[graph.loss],
        seed=names[graph.seed],
        gradients={names[value]: names[gradient] for value, gradient in graph.gradients.items()},
        contributions={
            names[gradient]: tuple((node_ids.get(node, -1), names[value]) for node, value in parts)
            for gradient, parts in graph.contributions.items()
        },
        mutations=tuple((names[buffer], names[value]) for buffer, value in graph.mutations),
    )
