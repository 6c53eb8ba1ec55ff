"""Nodes as functions: what they take that is not there, and what others use of what they make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from stagewright.graph.graph import Node
from stagewright.graph.stage import Function, made_by


def part(nodes: Sequence[Node], resident: Collection[int], used: Iterable[int]) -> Function:
    """`nodes` as a function beside values that are `resident`; `used` are values that others use, in order."""
    made = made_by(nodes)
    inputs = dict.fromkeys(
        value for node in nodes for value in node.inputs if value not in made and value not in resident
    )
    return Function(tuple(nodes), tuple(inputs), tuple(value for value in used if value in made))


def parted(function: Function, resident: Iterable[int], kind: Callable[[Node], bool]) -> list[Function]:
    """`function` as runs of nodes of one kind each; what a part makes and a later one uses is among its outputs."""
    runs = [tuple(nodes) for _, nodes in groupby(function.nodes, kind)]
    there = {*resident} - {*function.inputs}
    later = {*function.outputs}
    parts: list[Function] = []
    for nodes in reversed(runs):
        parts.append(part(nodes, there, sorted(later)))
        later |= {*parts[-1].inputs}
    return parts[::-1]
