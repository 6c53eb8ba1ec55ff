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
        is_softmax = node.part is Part.FORWARD and short_name(node.op) in _SOFTMAX
        if is_softmax and (behind := _behind(graph, node)):
            found.update(behind, _before(node, maker))
    return frozenset(graph.values[value].storage for value in found)


def _before(softmax: Node, maker: dict[int, Node]) -> Iterator[int]:
    """Back to the product that makes the scores."""
    value = softmax.inputs[0]
    while value in maker and maker[value].part is Part.FORWARD:
        yield value
        if short_name(maker[value].op) in _PRODUCTS:
            return
        value = maker[value].inputs[0]


def _behind(graph: OperatorGraph, softmax: Node) -> set[int]:
    """On to the product with the values: what is as large as the scores in between. Nothing of a softmax that is for
    something else, as the choice of experts."""
    size = _elements(graph, softmax)
    waiting, found, meets_product = [softmax], set[int](), False
    while waiting:
        node = waiting.pop()
        made = [value for value in node.outputs if value is not None and value not in found]
        found.update(made)
        users = [graph.nodes[user] for value in made for user in graph.consumers.get(value, ())]
        for user in users:
            if user.part is not Part.FORWARD:
                continue
            if short_name(user.op) in _PRODUCTS:
                meets_product = True
            elif _elements(graph, user) == size:
                waiting.append(user)
    return found if meets_product else set()


def _elements(graph: OperatorGraph, node: Node) -> int:
    made = node.outputs[0]
    return 0 if made is None else graph.values[made].meta.num_elements
