"""Savings of a compiler: chains of memory-bound operators become one kernel.

A compiler such as Inductor computes an operator inside the kernel of the one that computed its input, if both only stream
elements: values between them are neither written nor read, and only the first of a chain is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.estimation.operators import Kernel, work
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.graph import short_name
from stagewright.graph.tensor_parallel import COLLECTIVES

_STREAMS = (Kernel.MEMORY, Kernel.NORM)

_APART = frozenset({"argsort", "embedding_dense_backward", "histc", "index_put", "nonzero", "sort", "topk"})
"""Operators with separate kernels although they are memory-bound."""


@dataclass(frozen=True)
class Fusion:
    """Remaining memory traffic of a node in bytes, and whether it launches a kernel."""

    bytes_moved: float
    is_launched: bool


def fused(graph: OperatorGraph) -> dict[int, Fusion]:
    """Map the id of every node that a compiler fuses to its remaining costs in a compiled forward or backward.

    Values that are saved for the backward, and those that other kernels read, are written as they are in eager
    execution. Source: the vertical fusion of TorchInductor (Ansel et al., ASPLOS 2024, "PyTorch 2"), which also merges
    reductions with following elementwise operators.
    Ignores: horizontal fusion and fusion into the epilogues of matmuls; loops that do not match; chains that a compiler cuts
    because of their length.
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
    fusions = {}
    for node in graph.nodes:
        if node.id not in streaming:
            continue
        side = _side(node)
        fused_inputs = [
            value
            for value in dict.fromkeys(node.inputs)
            if (maker := makers.get(graph.values[value].storage)) is not None
            and maker.id in streaming
            and _side(maker) == side
        ]
        unwritten = [
            output
            for output in node.outputs
            if output is not None
            and (uses := readers.get(graph.values[output].storage))
            and all(reader.id in streaming and _side(reader) == side for reader in uses)
        ]
        eager_bytes = work(node, graph.values.__getitem__).bytes_moved
        avoided_bytes = sum(graph.values[value].meta.payload_bytes for value in (*fused_inputs, *unwritten))
        fusions[node.id] = Fusion(max(eager_bytes - avoided_bytes, 0.0), is_launched=not fused_inputs)
    return fusions


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
    """Return the function that a node is compiled in."""
    return max(node.part, Part.FORWARD)
