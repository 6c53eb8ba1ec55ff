"""Deep models: from the graph of a few of many equal layers, that of all of them.

A graph that leaves layers out says so among its facts (`Repeat`). The layer in front of the gap is the template: its
operators and values are copied for every layer that was left out, one behind the other, which is exact where that layer
relates to its neighbours as the layer before it does to its own. That is checked, node by node.
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
"""The fact of a graph that says which layers it leaves out."""

BEFORE, BEHIND = 4, 2
"""Layers that a graph must have on each side of those it leaves out: the template with its neighbours, and the ends."""


@dataclass(frozen=True)
class Repeat:
    """Layers that a graph leaves out: the members `missing` of the list `path`, which follow its members `before`, the last
    of which is the template, and are followed by its member `behind`.

    >>> Repeat("net.h", ("0", "1", "2", "3"), ("4", "5"), "6").layer("3")
    'net.h.3'
    """

    path: str
    before: tuple[str, ...]
    missing: tuple[str, ...]
    behind: str

    def layer(self, name: str) -> str:
        """The path of a member."""
        return f"{self.path}.{name}"


class IrregularLayers(ContractError):
    """Layers that were taken to be equal are not, so that none can stand for those that were left out."""


def expanded(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with all layers that it leaves out.

    Raises:
        IrregularLayers: the layers that it has are no pattern to be continued.
    """
    if REPEATS not in graph.facts:
        return graph
    for repeat in graph.facts[REPEATS]:
        graph = _Expansion(graph, repeat).graph()
    return replace(graph, facts={key: fact for key, fact in graph.facts.items() if key != REPEATS})


@dataclass(frozen=True)
class Copies:
    """Where everything of a graph that leaves layers out is in the whole one.

    `places`: for every operator of the whole body its position, or that of what it is a copy of, in the body of the graph.
    `counts`: of every node of the graph, how many the whole one has.
    """

    places: NDArray[np.int64]
    counts: NDArray[np.int64]

    def of_places(self, places: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every position of the whole body that one of `places` stands for, and the index among these of which it is one."""
        known = np.argsort(self.places, kind="stable")
        ends = np.searchsorted(self.places[known], [[one, one + 1] for one in places]).reshape(-1, 2)
        found = [known[first:stop] for first, stop in ends]
        which = np.repeat(np.arange(len(found)), [len(one) for one in found])
        return np.concatenate([*found, np.zeros(0, np.int64)]), which


def copies_of(graph: OperatorGraph) -> Copies:
    """Of `graph`, without making the whole one; raises as `expanded`."""
    body = list(graph.body)
    counts = np.ones(len(graph.nodes), np.int64)
    for repeat in graph.facts.get(REPEATS, ()):
        expansion = _Expansion(graph, repeat)
        counts[[node.id for node in expansion.template.nodes]] += expansion.num
        behind: dict[int, list[int]] = {}
        own: list[int] = []
        for number, copy in expansion.nodes.in_order(graph.body, expansion.num):
            if copy == 0:
                own = behind[number] = []
            own.append(number)
        body = [number for known in body for number in behind[known]]
    return Copies(np.array([graph.position[number] for number in body], np.int64), counts)


def is_pattern(graph: OperatorGraph) -> bool:
    """Whether the layers that `graph` has are a pattern, so that those that it leaves out follow."""
    try:
        for repeat in graph.facts.get(REPEATS, ()):
            _Expansion(graph, repeat)
    except IrregularLayers:
        return False
    return True


@dataclass
class _Layer:
    """What belongs to one layer: nodes in order, and values in an order that is the same for equal layers."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def own(self, name: str) -> str | None:
        """What is left of a name inside this layer; None for one outside."""
        if name == self.path:
            return ""
        return name.removeprefix(self.path) if name.startswith(f"{self.path}.") else None


_SECOND, _TEMPLATE, _NEXT = 1, 2, 3
"""Places of the layers that an expansion looks at: in front of the template one, which has another in front of it, and the
one behind the gap."""


class _Numbers:
    """Numbers of values, or of nodes, of layers that are alike: whose they are, and what is in their place in the next."""

    def __init__(self, layers: Sequence[Sequence[int]]) -> None:
        self.home = {number: place for place, layer in enumerate(layers) for number in layer}
        pairs = list(pairwise(layers))
        self.onwards = {mine: theirs for a, b in pairs for mine, theirs in zip(a, b, strict=True)}
        self.backwards = {theirs: mine for mine, theirs in self.onwards.items()}

    def shifted(self, number: int) -> int:
        """What is in its place in the next layer; itself where it belongs to none."""
        return self.onwards.get(number, number)

    def place(self, number: int, holder: int, copy: int, num_copies: int) -> tuple[int, int]:
        """Which copy of what number `number` is meant by copy `copy` of something in layer `holder`."""
        of = self.home.get(number, -1)
        if holder == _TEMPLATE:
            if of == _TEMPLATE:
                return number, copy
            if of == _SECOND and copy > 0:
                return self.onwards[number], copy - 1
            if of == _NEXT and copy < num_copies:
                return self.backwards[number], copy + 1
        elif holder == _NEXT and of == _TEMPLATE:
            return number, num_copies
        return number, 0

    def in_order(self, known: Iterable[int], num_copies: int) -> list[tuple[int, int]]:
        """`known` with those of all copies, as pairs of their number in the reduced graph and of a copy.

        What belongs to one layer and follows one another stays together: copies come behind the template's where the layer
        in front comes before these, and in front of them, the last first, where it is the other way round, as in the
        backward.
        """
        known = list(known)
        place = {one: index for index, one in enumerate(known)}
        runs: list[list[int]] = []
        last = -1
        for one in known:
            holder = self.home.get(one, -1)
            if holder == _TEMPLATE and last != _TEMPLATE:
                runs.append([])
            if holder == _TEMPLATE:
                runs[-1].append(one)
            last = holder if holder >= 0 else last
        before: dict[int, list[tuple[int, int]]] = {}
        behind: dict[int, list[tuple[int, int]]] = {}
        for run in runs:
            if place[self.backwards[run[0]]] < place[run[0]]:
                behind[run[-1]] = [(one, copy) for copy in range(1, num_copies + 1) for one in run]
            else:
                before[run[0]] = [(one, copy) for copy in range(num_copies, 0, -1) for one in run]
        order: list[tuple[int, int]] = []
        for one in known:
            order += before.get(one, ())
            order.append((one, 0))
            order += behind.get(one, ())
        return order


class _Expansion:
    def __init__(self, graph: OperatorGraph, repeat: Repeat) -> None:
        self.old, self.repeat = graph, repeat
        names = (*repeat.before[-3:], repeat.behind)
        layers = self._layers(names)
        self.second, self.template = layers[_SECOND], layers[_TEMPLATE]
        self.num = len(repeat.missing)
        for one, other in pairwise(layers):
            if len(one.nodes) != len(other.nodes) or len(one.values) != len(other.values):
                raise self._irregular(f"'{one.path}' and '{other.path}' have different numbers of operators")
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
        found = {layer.path: layer for layer in layers}
        depth = self.repeat.path.count(".") + 2

        def layer_of(module: str) -> _Layer | None:
            return found.get(".".join(module.split(".", depth)[:depth]))

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
        for gradient, made in graph.contributions.items():
            if gradient not in owner and made and graph.values[gradient].node < 0:
                of = {id(owner.get(value)): owner.get(value) for _, value in made}
                layer = next(iter(of.values())) if len(of) == 1 else None
                if layer is not None:
                    layer.values.append(gradient)
        for layer in layers:
            if len(set(layer.values)) < len(layer.values):
                raise self._irregular(f"'{layer.path}' has a parameter under several names")
        return layers

    # -- whether they are a pattern ---------------------------------------------------------------------------------

    def _check_pattern(self) -> None:
        """The template relates to its neighbours as the layer before it does."""
        graph, before, own = self.old, self.second, self.template

        shifted = self.values.shifted

        def counted(number: int, step: tuple[int, int]) -> int:
            return number + step[1] if number >= 0 else number

        for one, two in zip(before.nodes, own.nodes, strict=True):
            same = (
                (one.op, one.part, one.ordinal, one.is_kept, one.signature)
                == (two.op, two.part, two.ordinal, two.is_kept, two.signature)
                and (counted(one.draw, self.draws), counted(one.region, self.regions))
                == (two.draw, two.region)
                and before.own(one.module) == own.own(two.module)
                and renumbered((one.args, one.kwargs), shifted) == (two.args, two.kwargs)
                and tuple(map(shifted, one.inputs)) == two.inputs
                and self.nodes.shifted(one.forward) == two.forward
                and [value is None for value in one.outputs] == [value is None for value in two.outputs]
            )
            if not same:
                raise self._irregular(f"{graph.describe(one)} is not what is in its place in '{own.path}'")
        for mine, theirs in zip(before.values, own.values, strict=True):
            one, two = graph.values[mine], graph.values[theirs]
            layout = one.meta, one.origin, one.needs_grad, shifted(one.storage)
            if layout != (two.meta, two.origin, two.needs_grad, two.storage):
                raise self._irregular(f"values of '{before.path}' and '{own.path}' differ in layout")
            parts = graph.contributions.get(mine, ())
            moved = tuple((self.nodes.shifted(node), shifted(value)) for node, value in parts)
            if mine in graph.contributions and moved != tuple(graph.contributions[theirs]):
                raise self._irregular(f"gradients of '{before.path}' and '{own.path}' have different parts")

    def _check_reach(self) -> None:
        """Nothing but a layer's neighbours knows its values, and it changes no buffer."""
        graph, home = self.old, self.values.home
        inner = {value for value, place in home.items() if place in (_SECOND, _TEMPLATE)}
        for value, users in graph.consumers.items():
            if value in inner:
                for user in users:
                    if abs(self.nodes.home.get(user, 9) - home[value]) > 1:
                        raise self._irregular(
                            f"{graph.describe(graph.nodes[user])} uses what one of them makes"
                        )
        rest = {graph.loss, *(value for pair in graph.mutations for value in pair)}
        for gradient, made in graph.contributions.items():
            if gradient not in inner:
                rest |= {value for _, value in made if home.get(value) != home.get(gradient, -1)}
        if rest & inner:
            raise self._irregular("something outside is made of what one of them makes")

    def _step(self, found: Iterable[int]) -> tuple[int, int]:
        """The largest of numbers that count along the model, and how many there are in one layer."""
        numbers = {number for number in found if number >= 0}
        return (max(numbers), max(numbers) - min(numbers) + 1) if numbers else (-1, 0)

    # -- the whole graph --------------------------------------------------------------------------------------------

    def graph(self) -> OperatorGraph:
        """The graph with a copy of the template for every missing layer, numbered as if it had been traced whole."""
        old = self.old
        values = self.values.in_order(range(len(old.values)), self.num)
        self.number = {key: index for index, key in enumerate(values)}
        order = self.nodes.in_order(range(len(old.nodes)), self.num)
        self.number_of_node = {key: index for index, key in enumerate(order)}
        nodes = tuple(self._node(*key) for key in order)
        late = old.facts.get("late")
        if late is not None:
            late += self.num * sum(node.part is Part.FORWARD for node in self.template.nodes)
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
            num_draws=old.num_draws + self.num * self.draws[1],
            facts=old.facts | ({} if late is None else {"late": late}),
        )

    def _value_number(self, value: int, holder: int, copy: int) -> int:
        return self.number[self.values.place(value, holder, copy, self.num)]

    def _node_number(self, node: int, holder: int, copy: int) -> int:
        return -1 if node < 0 else self.number_of_node[self.nodes.place(node, holder, copy, self.num)]

    def _name(self, name: str, copy: int) -> str:
        """A name of the template as that of its copy."""
        own = self.template.own(name)
        return name if own is None or copy == 0 else self.repeat.layer(self.repeat.missing[copy - 1]) + own

    def _value(self, value: int, copy: int) -> Value:
        found, holder = self.old.values[value], self.values.home.get(value, -1)
        return Value(
            self.number[value, copy], found.meta, self._value_number(found.storage, holder, copy), found.origin,
            self._name(found.name, copy), self._node_number(found.node, holder, copy), found.needs_grad,
        )  # fmt: skip

    def _node(self, node: int, copy: int) -> Node:
        found, holder = self.old.nodes[node], self.nodes.home.get(node, -1)

        def number(value: int) -> int:
            return self._value_number(value, holder, copy)

        return Node(
            self.number_of_node[node, copy],
            found.op,
            renumbered(found.args, number),
            renumbered(found.kwargs, number) if found.kwargs else (),
            tuple(map(number, found.inputs)),
            tuple(None if value is None else number(value) for value in found.outputs),
            found.part,
            self._node_number(found.forward, holder, copy),
            self._name(found.module, copy),
            found.ordinal,
            found.signature,
            self._counted(found.draw, self.draws, copy),
            found.where,
            self._counted(found.region, self.regions, copy),
            found.is_kept,
        )

    def _counted(self, number: int, step: tuple[int, int], copy: int) -> int:
        """A number that counts along the model: those behind the template's move on by all copies."""
        last, count = step
        return number + (self.num if number > last else copy) * count if number >= 0 else number

    def _named(self, kind: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        own = [(name, value) for name, value in kind.items() if self.template.own(name) is not None]
        for name, value in kind.items():
            yield name, self.number[value, 0]
            if own and name == own[-1][0]:
                for copy in range(1, self.num + 1):
                    yield from ((self._name(each, copy), self.number[what, copy]) for each, what in own)

    def _gradients(self) -> Iterator[tuple[int, int]]:
        for value, copy in self.values.in_order(self.old.gradients, self.num):
            holder, gradient = self.values.home.get(value, -1), self.old.gradients[value]
            yield self.number[value, copy], self._value_number(gradient, holder, copy)

    def _contributions(self) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        for gradient, copy in self.values.in_order(self.old.contributions, self.num):
            holder = self.values.home.get(gradient, -1)
            parts = tuple(
                (self._node_number(node, holder, copy), self._value_number(value, holder, copy))
                for node, value in self.old.contributions[gradient]
            )
            yield self.number[gradient, copy], parts
