"""A function in parts that run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from stagewright.graph.graph import Node
from stagewright.graph.stage import Function, made_by


def parted(function: Function, resident: Iterable[int], kind: Callable[[Node], bool]) -> list[Function]:
    """`function` as runs of nodes of one kind each; what a part makes and a later one uses is among its outputs."""
    runs = [tuple(nodes) for _, nodes in groupby(function.nodes, kind)]
    there = {*resident} - {*function.inputs}
    later = {*function.outputs}
    parts: list[Function] = []
    for nodes in reversed(runs):
        made = made_by(nodes)
        inputs = dict.fromkeys(v for node in nodes for v in node.inputs if v not in made and v not in there)
        parts.append(Function(nodes, tuple(inputs), tuple(sorted(made & later))))
        later |= inputs.keys()
    return parts[::-1]
