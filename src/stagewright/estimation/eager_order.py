"""Order of a graph's operators in eager execution, and the operators that autograd runs together.

The graph separates input gradients, weight gradients and values derived from parameters alone; autograd runs them operator
by operator, and the forward of a checkpointed module a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stagewright.graph import Node, OperatorGraph, Origin, Part
from stagewright.graph.graph import short_name

FORWARD = frozenset({Part.STATIC, Part.DERIVED, Part.PROLOGUE, Part.FORWARD})


@dataclass(frozen=True)
class EagerCall:
    """One call of an operator; `again` if it belongs to the repetition of a checkpointed forward."""

    node: Node
    again: bool = False


def ends_of_backwards(calls: Sequence[EagerCall]) -> list[tuple[int, int]]:
    """Return, for each call, the first and last place of the backward that it is part of; its own place in the forward."""
    ends: list[tuple[int, int]] = []
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
        ends += [(begin, end)] * (end + 1 - begin)
        begin = end + 1
    return ends


def checkpoint_segments(graph: OperatorGraph, checkpointed: Sequence[str]) -> dict[int, int]:
    """Map forward nodes, and casts of their parameters, to the index of the checkpointed module they belong to, or, if none
    are named, to the region that the model's own code checkpoints."""
    if not checkpointed:
        return {node.id: node.region for node in graph.nodes if node.region >= 0}
    places = {path: index for index, path in enumerate(checkpointed)}
    segments: dict[int, int] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD or casts_parameter(graph, node):
            parts = node.module.split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            outer = next((places[prefix] for prefix in prefixes if prefix in places), None)
            if outer is not None:
                segments[node.id] = outer
    return segments


def casts_parameter(graph: OperatorGraph, node: Node) -> bool:
    return (
        node.part in FORWARD
        and short_name(node.op) == "_to_copy"
        and graph.values[node.inputs[0]].origin is Origin.PARAMETER
    )


def with_repeats(order: Iterable[Node], segment: Mapping[int, int]) -> Iterator[EagerCall]:
    """Yield calls in running order, with each checkpointed forward repeated before its backward."""
    forwards: dict[int, list[Node]] = {}
    repeated: set[int] = set()
    for node in order:
        if node.part in FORWARD and node.id in segment:
            forwards.setdefault(segment[node.id], []).append(node)
        index = -1 if node.part in FORWARD else segment.get(node.forward, -1)
        if index >= 0 and index not in repeated:
            repeated.add(index)
            yield from (EagerCall(again, True) for again in forwards[index])
        yield EagerCall(node)


def in_order(graph: OperatorGraph) -> Iterator[Node]:
    """Yield the nodes in the order of eager execution.

    Values that the graph computes in advance are computed right before their first use, and the gradient through them as
    soon as all its parts exist.
    """
    early = {Part.STATIC, Part.DERIVED}
    early_ids = {node.id for node in graph.nodes if node.part in early}
    waiting = {
        output: node
        for node in graph.nodes
        if node.part in early
        for output in node.outputs
        if output is not None
    }
    late = [node for node in graph.nodes if node.part not in FORWARD and node.forward in early_ids]
    late_ids = {node.id for node in late}
    done: set[int] = set()

    def ready(node: Node) -> Iterator[Node]:
        for value in node.inputs:
            maker = waiting.get(value)
            if maker is not None and maker.id not in done:
                done.add(maker.id)
                yield from ready(maker)
                yield maker

    followers = _Followers(graph, late)
    for group in _groups(node for node in graph.nodes if node.part not in early and node.id not in late_ids):
        for node in _by_operand(graph, group, early_ids):
            yield from ready(node)
            yield node
        for node in followers.after(group):
            yield from ready(node)
            yield node


def _groups(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    """Yield nodes one by one, but those of one operator's backward together."""
    for _, group in groupby(
        nodes, lambda node: (node.part in FORWARD, node.id if node.part in FORWARD else node.forward)
    ):
        yield list(group)


class _Followers:
    """Nodes that run as soon as all their inputs exist."""

    def __init__(self, graph: OperatorGraph, nodes: Sequence[Node]) -> None:
        makers = {output for node in graph.nodes if node.part not in FORWARD for output in node.outputs}
        self.missing = {node.id: len(set(node.inputs) & makers) for node in nodes}
        self.users: dict[int, list[Node]] = {}
        for node in nodes:
            for value in set(node.inputs) & makers:
                if value is not None:
                    self.users.setdefault(value, []).append(node)

    def after(self, group: Iterable[Node]) -> Iterator[Node]:
        """Yield the nodes whose last missing input `group` computes, each followed by those that wait for it."""
        for node in group:
            for output in node.outputs:
                for user in self.users.get(output, ()) if output is not None else ():
                    self.missing[user.id] -= 1
                    if not self.missing[user.id]:
                        yield user
                        yield from self.after([user])


def _by_operand(graph: OperatorGraph, group: list[Node], early_ids: set[int]) -> list[Node]:
    """Return one operator's backward in the order of its operands: gradients of parameters come first if the parameters do.

    Source: torch/csrc/autograd/Functions.cpp, whose generated functions compute gradients operand after operand.
    """
    if len(group) < 2 or group[0].part in FORWARD:
        return group
    forward = graph.nodes[group[0].forward]
    is_parameter = [
        graph.values[value].origin is Origin.PARAMETER or graph.values[value].node in early_ids
        for value in forward.inputs
    ]
    if is_parameter != sorted(is_parameter, reverse=True) or all(is_parameter) or not any(is_parameter):
        return group
    weights = [node for node in group if node.part is Part.WEIGHT_GRAD]
    others = [node for node in group if node.part is not Part.WEIGHT_GRAD]
    results = {output for node in others for output in node.outputs}
    return group if any(results & set(node.inputs) for node in weights) else weights + others


def added_in_place(graph: OperatorGraph, order: list[Node]) -> dict[int, int]:
    """Map each sum of cotangents to its first addend if autograd adds into that, because nothing uses it later."""
    last = {value: place for place, node in enumerate(order) for value in node.inputs}
    addends: dict[int, int] = {}
    for place, node in enumerate(order):
        if node.part is not Part.INPUT_GRAD or node.op != "aten.add.Tensor" or len(node.inputs) != 2:
            continue
        first, output = node.inputs[0], node.outputs[0]
        same = output is not None and graph.values[first].meta == graph.values[output].meta
        if same and output is not None and last[first] == place and graph.values[first].storage == first:
            addends[output] = first
    return addends
