"""What a compiler saves: chains of operators that are bound by memory become one kernel.

A compiler such as Inductor computes an operator inside the kernel of the one that made its input, as long as both only
stream elements: what passes between them is neither written nor read, and only the first of a chain is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.estimation.operators import Kernel, work
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.graph import short_name
from stagewright.graph.tensor_parallel import COLLECTIVES

_STREAMS = (Kernel.MEMORY, Kernel.NORM)

_APART = frozenset({"argsort", "embedding_dense_backward", "histc", "index_put", "nonzero", "sort", "topk"})
"""Operators with kernels of their own, although memory bounds them."""


@dataclass(frozen=True)
class Fusion:
    """What is left of a node's traffic: bytes that pass through memory, and whether it starts a kernel."""

    bytes_moved: float
    is_launched: bool


def fused(graph: OperatorGraph) -> dict[int, Fusion]:
    """Node id -> what a compiled forward or backward leaves of it, for every node that a compiler fuses.

    Values that are saved for the backward, and those that other kernels read, are written as they are in eager
    execution. Source: the vertical fusion of TorchInductor (Ansel et al., ASPLOS 2024, "PyTorch 2"), which also merges
    reductions with what follows element by element.
    Ignores: fusion of kernels side by side and into the ends of matrix products; loops that do not match; chains
    that a compiler cuts for their length.
    """
    streaming = {node.id for node in graph.nodes if _streams(graph, node)}
    makers: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for output in node.outputs:
            if output is not None:
                makers.setdefault(graph.values[output].storage, node)
        if not _is_view(graph, node):
            for value in node.inputs:
                readers.setdefault(graph.values[value].storage, []).append(node)
    found = {}
    for node in graph.nodes:
        if node.id not in streaming:
            continue
        side = _side(node)
        inside = [
            value
            for value in dict.fromkeys(node.inputs)
            if (maker := makers.get(graph.values[value].storage)) is not None
            and maker.id in streaming
            and _side(maker) == side
        ]
        kept_inside = [
            output
            for output in node.outputs
            if output is not None
            and (uses := readers.get(graph.values[output].storage))
            and all(reader.id in streaming and _side(reader) == side for reader in uses)
        ]
        eager = work(node, graph.values.__getitem__).bytes_moved
        less = sum(graph.values[value].meta.payload_bytes for value in (*inside, *kept_inside))
        found[node.id] = Fusion(max(eager - less, 0.0), not inside)
    return found


def _streams(graph: OperatorGraph, node: Node) -> bool:
    return (
        node.op not in COLLECTIVES
        and work(node, graph.values.__getitem__).kernel in _STREAMS
        and short_name(node.op) not in _APART
        and len(node.outputs) > 0
    )


def _is_view(graph: OperatorGraph, node: Node) -> bool:
    return work(node, graph.values.__getitem__).kernel is Kernel.VIEW


def _side(node: Node) -> Part:
    """The function that a node is compiled in."""
    return max(node.part, Part.FORWARD)
