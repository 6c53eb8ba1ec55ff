"""Attention whose scores are values of the graph: what selective recomputation makes again."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.graph.graph import Node, OperatorGraph, Part, short_name

_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_PRODUCTS = frozenset({"bmm", "baddbmm", "mm", "addmm"})


def attention_scores(graph: OperatorGraph) -> frozenset[int]:
    """Storages made between the product of queries and keys and that with the values: scores, their softmax, its dropout.

    Source: selective recomputation, Korthikanti et al. 2022 (arXiv 2205.05198), section 5. None where attention is one
    kernel.
    """
    maker = {value: node for node in graph.nodes for value in node.outputs if value is not None}
    found: set[int] = set()
    for node in graph.nodes:
        if node.part is Part.FORWARD and short_name(node.op) in _SOFTMAX:
            found.update(_before(node, maker))
            found.update(_behind(graph, node))
    return frozenset(graph.values[value].storage for value in found)


def _before(softmax: Node, maker: dict[int, Node]) -> Iterator[int]:
    """Back to the product that makes the scores."""
    value = softmax.inputs[0]
    while value in maker and maker[value].part is Part.FORWARD:
        yield value
        if short_name(maker[value].op) in _PRODUCTS:
            return
        value = maker[value].inputs[0]


def _behind(graph: OperatorGraph, softmax: Node) -> Iterator[int]:
    """On to the product with the values."""
    waiting = [softmax]
    while waiting:
        node = waiting.pop()
        made = [value for value in node.outputs if value is not None]
        yield from made
        users = (graph.nodes[user] for value in made for user in graph.consumers.get(value, ()))
        waiting += [
            user for user in users if user.part is Part.FORWARD and short_name(user.op) not in _PRODUCTS
        ]
