"""Stages that are alike: one follows from another by other numbers, so that only one of them is carved under each policy.

Carving looks at the nodes of a stage, at the values that they use, at where these come from, and at the order of all their
numbers. Where each has a counterpart in another stage, and the counterparts are in the same order, what is carved has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from stagewright.graph.cutting import Cutting
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Value, renumbered
from stagewright.graph.policy import Policy
from stagewright.graph.stage import Function, Stage, Transfer

_ELSEWHERE = (Part.STATIC, Part.DERIVED, Part.PROLOGUE)


@dataclass(frozen=True, eq=False)
class Twin:
    """Stage `first`, and the numbers in the stage `steps` behind it of its values and nodes; others are the same in both."""

    graph: OperatorGraph
    first: int
    steps: int
    values: dict[int, int]
    nodes: dict[int, int]

    @cached_property
    def _back(self) -> tuple[dict[int, int], dict[int, int]]:
        values, nodes = ({there: here for here, there in one.items()} for one in (self.values, self.nodes))
        return values, nodes

    def policy_of_first(self, policy: Policy) -> Policy:
        """What says the same of the first as `policy` says of the other; what it says of further stages is left out."""
        values, nodes = self._back

        def back(chosen: Iterable[int]) -> frozenset[int]:
            return frozenset(values[value] for value in chosen if value in values)

        return replace(
            policy, recompute=back(policy.recompute), offload=back(policy.offload), checkpoints=back(policy.checkpoints),
            reruns=tuple((nodes[at], tuple(map(nodes.__getitem__, again))) for at, again in policy.reruns),
        )  # fmt: skip

    def value(self, number: int) -> int:
        """The counterpart of a value; those that carving adds are numbered alike."""
        return self.values.get(number, number)

    def each(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.values.get(number, number) for number in numbers)

    def described(self, value: Value) -> Value:
        """The counterpart of a value, as the stage holds it."""
        number = self.value(value.id)
        name = self.graph.values[number].name if number < len(self.graph.values) else value.name
        return Value(
            number, value.meta, self.value(value.storage), value.origin, name,
            self.nodes.get(value.node, value.node), value.needs_grad,
        )  # fmt: skip

    def node(self, node: Node) -> Node:
        """The counterpart of a node, of the graph or made by carving."""
        number = self.nodes.get(node.id, node.id)
        if node.id >= 0 and self.graph.nodes[node.id] is node:
            return self.graph.nodes[number]
        like = self.graph.nodes[number] if number >= 0 else node
        return replace(
            like, id=number, op=node.op, part=node.part, signature=node.signature,
            args=renumbered(node.args, self.value), kwargs=renumbered(node.kwargs, self.value),
            inputs=self.each(node.inputs),
            outputs=tuple(None if value is None else self.value(value) for value in node.outputs),
            forward=self.nodes.get(node.forward, node.forward),
        )  # fmt: skip

    def _function(self, function: Function) -> Function:
        return Function(
            tuple(map(self.node, function.nodes)), self.each(function.inputs), self.each(function.outputs)
        )

    def _transfers(self, transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        return tuple(Transfer(one.stage + self.steps, self.each(one.values)) for one in transfers)

    def stage(self, stage: Stage, start: int, stop: int) -> Stage:
        """The counterpart, which begins and stops there, of what was carved of the first."""
        return Stage(
            index=stage.index + self.steps,
            start=start,
            stop=stop,
            graph=stage.graph,
            extra={self.value(number): self.described(value) for number, value in stage.extra.items()},
            parameters=self.each(stage.parameters),
            buffers=self.each(stage.buffers),
            constants=self.each(stage.constants),
            inputs=self.each(stage.inputs),
            static=tuple(map(self.node, stage.static)),
            derived=tuple(map(self.node, stage.derived)),
            forward=self._function(stage.forward),
            input_grad=self._function(stage.input_grad),
            weight_grad=self._function(stage.weight_grad),
            backward=self._function(stage.backward),
            rebuild=self._function(stage.rebuild),
            receives=self._transfers(stage.receives),
            sends=self._transfers(stage.sends),
            grad_receives=self._transfers(stage.grad_receives),
            grad_sends=self._transfers(stage.grad_sends),
            saved=self.each(stage.saved),
            offloaded=self.each(stage.offloaded),
            relayed=self.each(stage.relayed),
            gradients=tuple((self.value(one), self.value(gradient)) for one, gradient in stage.gradients),
            mutations=stage.mutations,
            computes_loss=stage.computes_loss,
            local_bytes={self.value(number): size for number, size in stage.local_bytes.items()},
            remade=self._function(stage.remade),
            late=stage.late,
        )  # fmt: skip


class Twins:
    """Which stages of a cutting are like one in front of them.

    Args:
        located: describes a value as a stage holds it, for what that sends.
    """

    def __init__(self, cutting: Cutting, located: Callable[[int, int], Value]) -> None:
        self._cutting = cutting
        self._located = located
        self._transfers = [_Transfers() for _ in range(cutting.num_stages)]
        for routes, place in ((cutting.forward_routes, 0), (cutting.grad_routes, 1)):
            for (source, target), values in sorted(routes.items()):
                self._transfers[source].sent[place, target - source] = values
                self._transfers[target].received[place, source - target] = values
        self._firsts: dict[tuple[object, ...], list[int]] = {}
        self._known: dict[int, Twin | None] = {}

    def of(self, index: int) -> Twin | None:
        """The stage that `index` is like, the first of these; None where it is like none in front of it."""
        for stage in range(len(self._known), index + 1):
            alike = self._firsts.setdefault(self._shape(stage), [])
            found = (self._matched(first, stage) for first in alike)
            self._known[stage] = next((twin for twin in found if twin is not None), None)
            if self._known[stage] is None:
                alike.append(stage)
        return self._known[index]

    def _shape(self, index: int) -> tuple[object, ...]:
        cutting, own = self._cutting, self._transfers[index]
        nodes = (*cutting.nodes_of[index], *cutting.floating_of[index])
        return tuple(node.signature for node in nodes), tuple(own.sent), tuple(own.received)

    def _matched(self, first: int, index: int) -> Twin | None:
        cutting, graph = self._cutting, self._cutting.graph
        last = cutting.bounds[index + 1]
        changes = any({first, index} & updaters for updaters in cutting.updaters.values())
        if changes or last > graph.late or last == len(graph.body):
            return None  # what changes a buffer, runs with the backward or returns the loss is looked at otherwise
        matching = _Matching(cutting)
        mine, theirs = self._transfers[first], self._transfers[index]
        if not (matching.stages(first, index) and mine.matches(theirs, matching)):
            return None
        twin = Twin(graph, first, index - first, matching.values, matching.nodes)
        for (_, step), values in mine.received.items():
            for value in values:
                here, there = (
                    self._located(first + step, value),
                    self._located(index + step, twin.value(value)),
                )
                if twin.described(here) != there:
                    return None
        return twin


class _Transfers:
    """Values that a stage sends and receives, by direction (forward or back) and steps to the other stage."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.received: dict[tuple[int, int], list[int]] = {}

    def matches(self, other: _Transfers, matching: _Matching) -> bool:
        """Whether each value has its counterpart there; as many stages are in the same places."""
        return all(
            matching.each_value(mine[key], theirs[key])
            for mine, theirs in ((self.sent, other.sent), (self.received, other.received))
            for key in mine
        )


class _Matching:
    """Counterparts in another stage of the values and nodes of one, found as they are met."""

    def __init__(self, cutting: Cutting) -> None:
        self.cutting = cutting
        self.graph = cutting.graph
        self.values: dict[int, int] = {}
        self.nodes: dict[int, int] = {}

    def stages(self, first: int, index: int) -> bool:
        pairs = [
            pair
            for found in (self.cutting.nodes_of, self.cutting.floating_of)
            for pair in zip(found[first], found[index], strict=True)
        ]
        return (
            all(self.node(*pair) for pair in pairs)
            and self._gradients(first, index)
            and all(self.nodes.get(one.forward, one.forward) == two.forward for one, two in pairs)
            and all(self._is_called_alike(*pair) for pair in pairs)
            and _is_in_order(self.values)
            and _is_in_order(self.nodes)
        )

    def node(self, one: Node, two: Node) -> bool:
        known = self.nodes.get(one.id)
        if known is not None or one.id == two.id:
            return known in (two.id, None) and self.nodes.setdefault(one.id, two.id) == two.id
        self.nodes[one.id] = two.id
        return (
            (one.op, one.part, one.signature, one.is_kept) == (two.op, two.part, two.signature, two.is_kept)
            and self.each_value(one.inputs, two.inputs)
            and self.each_value(one.outputs, two.outputs)
        )

    def each_value(self, mine: Iterable[int | None], theirs: Iterable[int | None]) -> bool:
        mine, theirs = tuple(mine), tuple(theirs)
        return len(mine) == len(theirs) and all(map(self.value, mine, theirs))

    def value(self, one: int | None, two: int | None) -> bool:
        if one is None or two is None:
            return one is two
        if one in self.values:
            return self.values[one] == two
        self.values[one] = two
        mine, theirs = self.graph.values[one], self.graph.values[two]
        sizes = self.graph.storage_bytes
        if one == two:
            return self.value(mine.storage, mine.storage)
        if (mine.meta, mine.origin, mine.needs_grad) != (theirs.meta, theirs.origin, theirs.needs_grad):
            return False
        if (mine.node < 0) != (theirs.node < 0) or not self.value(mine.storage, theirs.storage):
            return False
        if mine.storage == one and sizes[one] != sizes[two]:
            return False
        if mine.node < 0:
            return True
        makers = self.graph.nodes[mine.node], self.graph.nodes[theirs.node]
        if makers[0].part in _ELSEWHERE:
            return self.node(*makers)
        return self.nodes.setdefault(mine.node, theirs.node) == theirs.node

    def _gradients(self, first: int, index: int) -> bool:
        mine, theirs = self.cutting.gradients_of[first], self.cutting.gradients_of[index]
        return self.each_value(mine, theirs) and all(
            self.each_value(self._summed(one, first), self._summed(two, index))
            for one, two in zip(mine, theirs, strict=True)
        )

    def _summed(self, gradient: int, index: int) -> list[int]:
        """Whose gradient it is, where it is a parameter's, and what a stage adds up for it."""
        stage = self.cutting.body_stage
        own = [value for node, value in self.graph.contributions[gradient] if stage.get(node, index) == index]
        trained = self._trained.get(gradient)
        return [*own, *([] if trained is None else [trained])]

    @cached_property
    def _trained(self) -> Mapping[int, int]:
        values, gradients = self.graph.values, self.graph.gradients
        return {
            gradient: value
            for value, gradient in gradients.items()
            if values[value].origin is Origin.PARAMETER
        }

    def _is_called_alike(self, one: Node, two: Node) -> bool:
        return renumbered((one.args, one.kwargs), self.values.__getitem__) == (two.args, two.kwargs)


def _is_in_order(counterparts: Mapping[int, int]) -> bool:
    return all(one < two for one, two in pairwise(there for _, there in sorted(counterparts.items())))
