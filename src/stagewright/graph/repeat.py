"""Expansion of a graph with a few of many equal layers to the graph with all of them.

A graph that leaves layers out says so among its facts (`Repeat`). The layer before the gap is the template: its operators
and values are copied for every missing layer, one after the other. That is exact if the template relates to its
neighbours as the layer before it does to its own, which is checked node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph, Part, Value, renumbered

REPEATS = "repeats"
"""Name of the graph's fact that lists the layers it leaves out."""

BEFORE, AFTER = 4, 2
"""Layers that a graph must have on each side of those it leaves out: the template with its neighbours, and the ends."""


@dataclass(frozen=True)
class Repeat:
    """A run of layers that a graph leaves out: the members `missing` of the list `path`. The graph has the members `before`
    them, the last of which is the template, and the member `after` them.

    >>> Repeat("net.h", ("0", "1", "2", "3"), ("4", "5"), "6").layer("3")
    'net.h.3'
    """

    path: str
    before: tuple[str, ...]
    missing: tuple[str, ...]
    after: str

    def layer(self, name: str) -> str:
        """Return the path of a member."""
        return f"{self.path}.{name}"


class IrregularLayers(ContractError):
    """Layers assumed to be equal are not, so none of them can stand for the missing ones."""


def expanded(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with all layers that it leaves out.

    Raises:
        IrregularLayers: the layers that it has do not form a repeatable pattern.
    """
    if REPEATS not in graph.facts:
        return graph
    for repeat in graph.facts[REPEATS]:
        graph = _Expansion(graph, repeat).graph()
    return replace(graph, facts={key: fact for key, fact in graph.facts.items() if key != REPEATS})


@dataclass(frozen=True)
class Copies:
    """The mapping from an expanded graph to the graph with layers left out.

    `places`: for every forward operator of the expanded graph, the index of its original in the reduced graph.
    `counts`: for every node of the reduced graph, how many copies the expanded one has.
    """

    places: NDArray[np.int64]
    counts: NDArray[np.int64]

    def of_places(self, places: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return every index in the expanded graph that one of `places` stands for, and the index of that one in
        `places`."""
        order = np.argsort(self.places, kind="stable")
        ends = np.searchsorted(self.places[order], [[place, place + 1] for place in places]).reshape(-1, 2)
        runs = [order[first:stop] for first, stop in ends]
        which = np.repeat(np.arange(len(runs)), [len(place) for place in runs])
        return np.concatenate([*runs, np.zeros(0, np.int64)]), which


def copies_of(graph: OperatorGraph) -> Copies:
    """Return the mapping of `graph` without expanding it; raises as `expanded`."""
    order = list(graph.forward_ids)
    counts = np.ones(len(graph.nodes), np.int64)
    for repeat in graph.facts.get(REPEATS, ()):
        expansion = _Expansion(graph, repeat)
        counts[[node.id for node in expansion.template.nodes]] += expansion.num_copies
        after: dict[int, list[int]] = {}
        copies: list[int] = []
        for number, copy in expansion.nodes.in_order(graph.forward_ids, expansion.num_copies):
            if copy == 0:
                copies = after[number] = []
            copies.append(number)
        order = [number for number_in_few in order for number in after[number_in_few]]
    return Copies(np.array([graph.position[number] for number in order], np.int64), counts)


def is_pattern(graph: OperatorGraph) -> bool:
    """Whether the layers of `graph` form a pattern from which the missing ones follow."""
    try:
        for repeat in graph.facts.get(REPEATS, ()):
            _Expansion(graph, repeat)
    except IrregularLayers:
        return False
    return True


@dataclass
class _Layer:
    """The nodes of one layer, in order, and its values, in an order that is the same for equal layers."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def suffix(self, name: str) -> str | None:
        """Return the rest of a name inside this layer; None for a name outside it."""
        if name == self.path:
            return ""
        return name.removeprefix(self.path) if name.startswith(f"{self.path}.") else None


_SECOND, _TEMPLATE, _NEXT = 1, 2, 3
"""Indices among the four layers that an expansion compares: the layer before the template, the template, and the one after
the gap."""


class _Numbers:
    """Ids of the values, or of the nodes, of equal layers: the layer of each, and its counterpart in the next layer."""

    def __init__(self, layers: Sequence[Sequence[int]]) -> None:
        self.home = {number: place for place, layer in enumerate(layers) for number in layer}
        pairs = list(pairwise(layers))
        self.onwards = {mine: theirs for a, b in pairs for mine, theirs in zip(a, b, strict=True)}
        self.backwards = {theirs: mine for mine, theirs in self.onwards.items()}

    def shifted(self, number: int) -> int:
        """Return its counterpart in the next layer; the number itself where it belongs to no layer."""
        return self.onwards.get(number, number)

    def place(self, number: int, holder: int, copy: int, num_copies: int) -> tuple[int, int]:
        """Return the number and copy that copy `copy` of an item in layer `holder` refers to by `number`."""
        home = self.home.get(number, -1)
        if holder == _TEMPLATE:
            if home == _TEMPLATE:
                return number, copy
            if home == _SECOND and copy > 0:
                return self.onwards[number], copy - 1
            if home == _NEXT and copy < num_copies:
                return self.backwards[number], copy + 1
        elif holder == _NEXT and home == _TEMPLATE:
            return number, num_copies
        return number, 0

    def in_order(self, numbers: Iterable[int], num_copies: int) -> list[tuple[int, int]]:
        """Return `numbers` and those of all copies, as pairs of a number in the reduced graph and a copy.

        Consecutive items of one layer stay together. Copies come after the template's where the previous layer comes before
        it, and before the template's, the last copy first, where the order is reversed, as in the backward.
        """
        numbers = list(numbers)
        place = {number: index for index, number in enumerate(numbers)}
        runs: list[list[int]] = []
        last = -1
        for number in numbers:
            holder = self.home.get(number, -1)
            if holder == _TEMPLATE and last != _TEMPLATE:
                runs.append([])
            if holder == _TEMPLATE:
                runs[-1].append(number)
            last = holder if holder >= 0 else last
        before: dict[int, list[tuple[int, int]]] = {}
        after: dict[int, list[tuple[int, int]]] = {}
        for run in runs:
            if place[self.backwards[run[0]]] < place[run[0]]:
                after[run[-1]] = [(number, copy) for copy in range(1, num_copies + 1) for number in run]
            else:
                before[run[0]] = [(number, copy) for copy in range(num_copies, 0, -1) for number in run]
        order: list[tuple[int, int]] = []
        for number in numbers:
            order += before.get(number, ())
            order.append((number, 0))
            order += after.get(number, ())
        return order


class _Expansion:
    def __init__(self, graph: OperatorGraph, repeat: Repeat) -> None:
        self.old, self.repeat = graph, repeat
        names = (*repeat.before[-3:], repeat.after)
        layers = self._layers(names)
        self.second, self.template = layers[_SECOND], layers[_TEMPLATE]
        self.num_copies = len(repeat.missing)
        for layer, next_layer in pairwise(layers):
            if len(layer.nodes) != len(next_layer.nodes) or len(layer.values) != len(next_layer.values):
                raise self._irregular(
                    f"'{layer.path}' and '{next_layer.path}' have different numbers of operators"
                )
        self.values = _Numbers([layer.values for layer in layers])
        self.nodes = _Numbers([[node.id for node in layer.nodes] for layer in layers])
        self.draws = self._step(node.draw for node in self.template.nodes)
        self.regions = self._step(node.region for node in self.template.nodes)
        self._check_pattern()
        self._check_reach()

    def _irregular(self, why: str) -> IrregularLayers:
        return IrregularLayers(
            f"layers of '{self.repeat.path}' in model '{self.old.name}' are not alike: {why}"
        )

    # -- what belongs to a layer ------------------------------------------------------------------------------------

    def _layers(self, names: Iterable[str]) -> list[_Layer]:
        graph = self.old
        layers = [_Layer(self.repeat.layer(name)) for name in names]
        layer_at = {layer.path: layer for layer in layers}
        depth = self.repeat.path.count(".") + 2

        def layer_of(module: str) -> _Layer | None:
            return layer_at.get(".".join(module.split(".", depth)[:depth]))

        for kind in (graph.parameters, graph.buffers):
            for name, value in kind.items():
                layer = layer_of(name)
                if layer is not None:
                    layer.values.append(value)
        for node in graph.nodes:
            layer = layer_of(node.module)
            if layer is not None:
                layer.nodes.append(node)
                layer.values += [value for value in node.outputs if value is not None]
        owner = {value: layer for layer in layers for value in layer.values}
        for value in graph.gradients:  # views of parameters that were merged away have gradients of their own
            root = graph.values[value].storage
            if value not in owner and root in owner:
                owner[root].values.append(value)
        for layer in layers:
            layer.values += [graph.gradients[value] for value in layer.values if value in graph.gradients]
        owner = {value: layer for layer in layers for value in layer.values}
        for gradient, parts in graph.contributions.items():
            if gradient not in owner and parts and graph.values[gradient].node < 0:
                layer = owner.get(parts[0][1])
                if layer is not None and all(owner.get(value) is layer for _, value in parts):
                    layer.values.append(gradient)
        for layer in layers:
            if len(set(layer.values)) < len(layer.values):
                raise self._irregular(f"'{layer.path}' has a parameter under several names")
        return layers

    # -- whether they are a pattern ---------------------------------------------------------------------------------

    def _check_pattern(self) -> None:
        """Check that the template relates to its neighbours as the layer before it does."""
        graph, before, template = self.old, self.second, self.template
        shifted = self.values.shifted
        for first, second in zip(before.nodes, template.nodes, strict=True):
            same = (
                (first.op, first.part, first.ordinal, first.is_kept, first.signature)
                == (second.op, second.part, second.ordinal, second.is_kept, second.signature)
                and self._counted(first.draw, self.draws, 1) == second.draw
                and self._counted(first.region, self.regions, 1) == second.region
                and before.suffix(first.module) == template.suffix(second.module)
                and renumbered((first.args, first.kwargs), shifted) == (second.args, second.kwargs)
                and tuple(map(shifted, first.inputs)) == second.inputs
                and self.nodes.shifted(first.forward) == second.forward
                and [value is None for value in first.outputs] == [value is None for value in second.outputs]
            )
            if not same:
                raise self._irregular(
                    f"{graph.describe(first)} differs from its counterpart in '{template.path}'"
                )
        for mine, theirs in zip(before.values, template.values, strict=True):
            first, second = graph.values[mine], graph.values[theirs]
            layout = first.meta, first.origin, first.needs_grad, shifted(first.storage)
            if layout != (second.meta, second.origin, second.needs_grad, second.storage):
                raise self._irregular(f"values of '{before.path}' and '{template.path}' differ in layout")
            parts = graph.contributions.get(mine, ())
            moved = tuple((self.nodes.shifted(node), shifted(value)) for node, value in parts)
            if mine in graph.contributions and moved != tuple(graph.contributions[theirs]):
                raise self._irregular(
                    f"gradients of '{before.path}' and '{template.path}' have different parts"
                )

    def _check_reach(self) -> None:
        """Check that only neighbours of a layer use its values, and that it changes no buffer."""
        graph, home = self.old, self.values.home
        inner = {value for value, place in home.items() if place in (_SECOND, _TEMPLATE)}
        for value, users in graph.consumers.items():
            if value in inner:
                for user in users:
                    place = self.nodes.home.get(user)
                    if place is None or abs(place - home[value]) > 1:
                        raise self._irregular(
                            f"{graph.describe(graph.nodes[user])} uses a value of one of them"
                        )
        outside = {graph.loss, *(value for pair in graph.mutations for value in pair)}
        for gradient, parts in graph.contributions.items():
            if gradient not in inner:
                outside |= {value for _, value in parts if home.get(value) != home.get(gradient, -1)}
        if outside & inner:
            raise self._irregular("something outside them is computed from a value of one of them")

    def _step(self, counters: Iterable[int]) -> tuple[int, int]:
        """Return the largest of a layer's numbers that count along the model, and how many it has."""
        numbers = {number for number in counters if number >= 0}
        return (max(numbers), max(numbers) - min(numbers) + 1) if numbers else (-1, 0)

    # -- the whole graph --------------------------------------------------------------------------------------------

    def graph(self) -> OperatorGraph:
        """Return the graph with a copy of the template for every missing layer, numbered as if it had been traced whole."""
        old = self.old
        values = self.values.in_order(range(len(old.values)), self.num_copies)
        self.number = {key: index for index, key in enumerate(values)}
        order = self.nodes.in_order(range(len(old.nodes)), self.num_copies)
        self.number_of_node = {key: index for index, key in enumerate(order)}
        nodes = tuple(self._node(*key) for key in order)
        late = old.facts.get("late")
        if late is not None:
            late += self.num_copies * sum(node.part is Part.FORWARD for node in self.template.nodes)
        return replace(
            old,
            values=tuple(self._value(*key) for key in values),
            nodes=nodes,
            parameters=dict(self._named(old.parameters)),
            buffers=dict(self._named(old.buffers)),
            inputs={name: self.number[value, 0] for name, value in old.inputs.items()},
            loss=self.number[old.loss, 0],
            seed=self.number[old.seed, 0],
            gradients=dict(self._gradients()),
            contributions=dict(self._contributions()),
            mutations=tuple((self.number[a, 0], self.number[b, 0]) for a, b in old.mutations),
            num_draws=old.num_draws + self.num_copies * self.draws[1],
            facts=old.facts | ({} if late is None else {"late": late}),
        )

    def _value_number(self, value: int, holder: int, copy: int) -> int:
        return self.number[self.values.place(value, holder, copy, self.num_copies)]

    def _node_number(self, node: int, holder: int, copy: int) -> int:
        return -1 if node < 0 else self.number_of_node[self.nodes.place(node, holder, copy, self.num_copies)]

    def _name(self, name: str, copy: int) -> str:
        """Return a name in the template as the name in a copy."""
        suffix = self.template.suffix(name)
        return (
            name if suffix is None or copy == 0 else self.repeat.layer(self.repeat.missing[copy - 1]) + suffix
        )

    def _value(self, value: int, copy: int) -> Value:
        original, holder = self.old.values[value], self.values.home.get(value, -1)
        return Value(
            self.number[value, copy], original.meta, self._value_number(original.storage, holder, copy), original.origin,
            self._name(original.name, copy), self._node_number(original.node, holder, copy), original.needs_grad,
        )  # fmt: skip

    def _node(self, node: int, copy: int) -> Node:
        original, holder = self.old.nodes[node], self.nodes.home.get(node, -1)

        def number(value: int) -> int:
            return self._value_number(value, holder, copy)

        return Node(
            self.number_of_node[node, copy],
            original.op,
            renumbered(original.args, number),
            renumbered(original.kwargs, number) if original.kwargs else (),
            tuple(map(number, original.inputs)),
            tuple(None if value is None else number(value) for value in original.outputs),
            original.part,
            self._node_number(original.forward, holder, copy),
            self._name(original.module, copy),
            original.ordinal,
            original.signature,
            self._counted(original.draw, self.draws, copy),
            original.where,
            self._counted(original.region, self.regions, copy),
            original.is_kept,
        )

    def _counted(self, number: int, step: tuple[int, int], copy: int) -> int:
        """Return a number that counts along the model for copy `copy`; numbers after the template move by all copies."""
        last, count = step
        return number + (self.num_copies if number > last else copy) * count if number >= 0 else number

    def _named(self, kind: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        of_template = [
            (name, value) for name, value in kind.items() if self.template.suffix(name) is not None
        ]
        for name, value in kind.items():
            yield name, self.number[value, 0]
            if of_template and name == of_template[-1][0]:
                for copy in range(1, self.num_copies + 1):
                    yield from (
                        (self._name(template_name, copy), self.number[template_value, copy])
                        for template_name, template_value in of_template
                    )

    def _gradients(self) -> Iterator[tuple[int, int]]:
        for value, copy in self.values.in_order(self.old.gradients, self.num_copies):
            holder, gradient = self.values.home.get(value, -1), self.old.gradients[value]
            yield self.number[value, copy], self._value_number(gradient, holder, copy)

    def _contributions(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        for gradient, copy in self.values.in_order(self.old.contributions, self.num_copies):
            holder = self.values.home.get(gradient, -1)
            parts = tuple(
                (self._node_number(node, holder, copy), self._value_number(value, holder, copy))
                for node, value in self.old.contributions[gradient]
            )
            yield self.number[gradient, copy], parts
