"""In which order eager execution runs a graph's operators, and what autograd does in one go.

The graph lists input gradients and weight gradients apart and what parameters alone decide in advance; autograd meets
them operator by operator, and a checkpointed module's forward a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stagewright.graph import Node, OperatorGraph, Origin, Part
from stagewright.graph.graph import short_name

FORWARD = frozenset({Part.STATIC, Part.DERIVED, Part.PROLOGUE, Part.FORWARD})


@dataclass(frozen=True)
class Call:
    """One operator as it is run: `again` where it is the repetition of a checkpointed forward."""

    node: Node
    again: bool = False


def ends_of_backwards(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """For each call the first and the last place of the backward it is part of; its own place in the forward."""
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < len(calls):
        node, end = calls[begin].node, begin
        while (
            node.part not in FORWARD
            and end + 1 < len(calls)
            and calls[end + 1].node.part not in FORWARD
            and calls[end + 1].node.forward == node.forward
        ):
            end += 1
        found += [(begin, end)] * (end + 1 - begin)
        begin = end + 1
    return found


def checkpoint_segments(graph: OperatorGraph, checkpointed: Sequence[str]) -> dict[int, int]:
    """Forward node -> which of the checkpointed modules it belongs to; casts of its parameters do as well. Where none are
    named, those are the regions of the model's own code."""
    if not checkpointed:
        return {node.id: node.region for node in graph.nodes if node.region >= 0}
    places = {path: index for index, path in enumerate(checkpointed)}
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD or casts_parameter(graph, node):
            parts = node.module.split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            outer = next((places[prefix] for prefix in prefixes if prefix in places), None)
            if outer is not None:
                found[node.id] = outer
    return found


def casts_parameter(graph: OperatorGraph, node: Node) -> bool:
    return (
        node.part in FORWARD
        and short_name(node.op) == "_to_copy"
        and graph.values[node.inputs[0]].origin is Origin.PARAMETER
    )


def with_repeats(order: Iterable[Node], segment: Mapping[int, int]) -> Iterator[Call]:
    """The order in which operators run, with each checkpointed forward once more in front of its backward."""
    forwards: dict[int, list[Node]] = {}
    repeated: set[int] = set()
    for node in order:
        if node.part in FORWARD and node.id in segment:
            forwards.setdefault(segment[node.id], []).append(node)
        index = -1 if node.part in FORWARD else segment.get(node.forward, -1)
        if index >= 0 and index not in repeated:
            repeated.add(index)
            yield from (Call(again, True) for again in forwards[index])
        yield Call(node)


def in_order(graph: OperatorGraph) -> Iterator[Node]:
    """The nodes as eager execution meets them.

    What the graph makes in advance is made in front of its first use, and the gradient through it as soon as all parts of
    it are there.
    """
    early = {Part.STATIC, Part.DERIVED}
    is_early = {node.id for node in graph.nodes if node.part in early}
    waiting = {
        output: node
        for node in graph.nodes
        if node.part in early
        for output in node.outputs
        if output is not None
    }
    late = [node for node in graph.nodes if node.part not in FORWARD and node.forward in is_early]
    is_late = {node.id for node in late}
    done: set[int] = set()

    def ready(node: Node) -> Iterator[Node]:
        for value in node.inputs:
            maker = waiting.get(value)
            if maker is not None and maker.id not in done:
                done.add(maker.id)
                yield from ready(maker)
                yield maker

    followers = _Followers(graph, late)
    for group in _groups(node for node in graph.nodes if node.part not in early and node.id not in is_late):
        for node in _by_operand(graph, group, is_early):
            yield from ready(node)
            yield node
        for node in followers.after(group):
            yield from ready(node)
            yield node


def _groups(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    """Nodes one by one, but those of one operator's backward together."""
    for _, group in groupby(
        nodes, lambda node: (node.part in FORWARD, node.id if node.part in FORWARD else node.forward)
    ):
        yield list(group)


class _Followers:
    """Nodes that run as soon as all their inputs are there."""

    def __init__(self, graph: OperatorGraph, nodes: Sequence[Node]) -> None:
        makers = {output for node in graph.nodes if node.part not in FORWARD for output in node.outputs}
        self.missing = {node.id: len(set(node.inputs) & makers) for node in nodes}
        self.users: dict[int, list[Node]] = {}
        for node in nodes:
            for value in set(node.inputs) & makers:
                if value is not None:
                    self.users.setdefault(value, []).append(node)

    def after(self, group: Iterable[Node]) -> Iterator[Node]:
        for node in group:
            for output in node.outputs:
                ready = self.users.get(output, ()) if output is not None else ()
                for user in ready:
                    self.missing[user.id] -= 1
                    if not self.missing[user.id]:
                        yield user
                        yield from self.after([user])


def _by_operand(graph: OperatorGraph, group: list[Node], is_early: set[int]) -> list[Node]:
    """One operator's backward in the order of its operands: gradients of parameters come first where they do.

    Source: torch/csrc/autograd/Functions.cpp, whose generated functions compute gradients operand after operand.
    """
    if len(group) < 2 or group[0].part in FORWARD:
        return group
    forward = graph.nodes[group[0].forward]
    is_parameter = [
        graph.values[value].origin is Origin.PARAMETER or graph.values[value].node in is_early
        for value in forward.inputs
    ]
    if is_parameter != sorted(is_parameter, reverse=True) or all(is_parameter) or not any(is_parameter):
        return group
    weights = [node for node in group if node.part is Part.WEIGHT_GRAD]
    others = [node for node in group if node.part is not Part.WEIGHT_GRAD]
    made = {output for node in others for output in node.outputs}
    return group if any(made & set(node.inputs) for node in weights) else weights + others


def added_in_place(graph: OperatorGraph, order: list[Node]) -> dict[int, int]:
    """Sum of cotangents -> the first addend, into which autograd adds when nothing else uses it later."""
    last = {value: place for place, node in enumerate(order) for value in node.inputs}
    found: dict[int, int] = {}
    for place, node in enumerate(order):
        if node.part is not Part.INPUT_GRAD or node.op != "aten.add.Tensor" or len(node.inputs) != 2:
            continue
        first, output = node.inputs[0], node.outputs[0]
        same = output is not None and graph.values[first].meta == graph.values[output].meta
        if same and output is not None and last[first] == place and graph.values[first].storage == first:
            found[output] = first
    return found
