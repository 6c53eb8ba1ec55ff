"""Nodes put between others as late as their users allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagewright.graph.graph import Node


def woven(nodes: Sequence[Node], extra: Sequence[Node], also: Iterable[int] = ()) -> list[Node]:
    """`nodes` in order, each of `extra` right before the first that needs it, directly or through others of `extra`.

    What only the values `also` need comes last; what nobody needs is left out.
    """
    makers = {output: node for node in extra for output in node.outputs if output is not None}
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
