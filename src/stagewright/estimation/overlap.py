"""Overlap of collectives with the matmuls and the attention that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.estimation.operators import Kernel, work
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.layers import layer_of
from stagewright.graph.tensor_parallel import ALL_GATHER, CONTEXT_GROUP, GROUP, REDUCE_SCATTER, group_of

OverlappedCollectives = Literal["none", "backward", "fused", "all"]

_SPLITS = 4
"""Parts in which a matmul and the reduce-scatter of its result follow each other. Source: Transformer Engine,
pytorch/module/base.py, the default `num_splits` of `initialize_ub`."""

COMPUTING = (Kernel.MATMUL, Kernel.ATTENTION, Kernel.ATTENTION_BACKWARD)


class Pair(NamedTuple):
    """A collective and the kernels (ids of nodes) that it overlaps with, where they run in the same function.

    `alone` is the fraction of the kernels' time in which nothing can be sent, `exposed` the fraction of the collective in
    which nothing can be computed.
    """

    collective: int
    kernels: tuple[int, ...]
    alone: float = 0.0
    exposed: float = 0.0


def pairs_of(graph: OperatorGraph, which: OverlappedCollectives) -> tuple[Pair, ...]:
    """Return the pairs of `graph` for a runtime's `overlapped_collectives`.

    * In the backward a repeated gather overlaps with the input gradients of the matmuls that it gathered for, and the
      reduce-scatter of these gradients with the matmuls of the weight gradients: each as a whole (``backward``, ``all``).
    * Inside layers a gather overlaps with the kernels that take its result, and a reduce-scatter with the one kernel whose
      result it adds up, in parts (``fused``, ``all``). Around a ring the first part is that of the rank itself: all but one
      of as many parts as there are ranks are computed while others are sent. With ``all``, the reduce-scatters of the
      forward are of four parts, of which the last is sent when all is computed.

    Context-parallel ranks exchange keys and values around a ring during attention (``all``).

    Source: Transformer Engine, pytorch/module/base.py (`initialize_ub`) and common/comm_gemm_overlap; PyTorch,
    torch/_inductor/fx_passes/micro_pipeline_tp.py and torch/distributed/_symmetric_memory, which compilers apply to layers.
    Ignores: multiprocessors that communication takes from matmuls; that smaller matmuls are less efficient.
    """
    return tuple(pair for pair in _Pairing(graph, which).pairs() if pair.kernels) if which != "none" else ()


class _Pairing:
    def __init__(self, graph: OperatorGraph, which: OverlappedCollectives) -> None:
        self.graph = graph
        self.which = which
        self._has_layers = any(layer_of(node.module) for node in graph.nodes)

    def pairs(self) -> Iterator[Pair]:
        groups = (GROUP, CONTEXT_GROUP) if self.which == "all" else (GROUP,)
        for node in self.graph.nodes:
            if node.op not in (ALL_GATHER, REDUCE_SCATTER) or group_of(node)[0] not in groups:
                continue
            whole = () if self.which == "fused" else self.in_backward(node)
            yield Pair(node.id, whole)
            is_whole = self.which == "backward" or (whole and node.op == REDUCE_SCATTER)
            if not is_whole and (layer_of(node.module) or not self._has_layers):
                yield self.in_parts(node)

    def in_parts(self, node: Node) -> Pair:
        """Return the pair of `node` with the kernels that take its result, or whose result it adds up."""
        if node.op == ALL_GATHER:
            return Pair(node.id, takers(self.graph, node), alone=1 / group_of(node)[1])
        if self.which == "all" and node.part is Part.FORWARD:
            return Pair(node.id, self.maker(node), alone=1 / _SPLITS, exposed=1 / _SPLITS)
        return Pair(node.id, self.maker(node), alone=1 / group_of(node)[1])

    def maker(self, node: Node) -> tuple[int, ...]:
        """Return the matmul or attention whose result `node` adds up, directly or through views."""
        maker = self.graph.values[node.inputs[0]].node
        while maker >= 0 and _kind(self.graph, self.graph.nodes[maker]) is Kernel.VIEW:
            maker = self.graph.values[self.graph.nodes[maker].inputs[0]].node
        return (maker,) if maker >= 0 and _kind(self.graph, self.graph.nodes[maker]) in COMPUTING else ()

    def in_backward(self, node: Node) -> tuple[int, ...]:
        """Return the kernels of the backward with which `node` overlaps as a whole."""
        entry = self.graph.nodes[node.forward]
        if node.forward < 0 or entry.op != ALL_GATHER:
            return ()
        part = Part.INPUT_GRAD if node.op == ALL_GATHER else Part.WEIGHT_GRAD
        backward = (grad for kernel in takers(self.graph, entry) for grad in self._backward_of[kernel])
        return tuple(
            grad.id for grad in backward if grad.part is part and _kind(self.graph, grad) in COMPUTING
        )

    @cached_property
    def _backward_of(self) -> dict[int, list[Node]]:
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if node.part > Part.FORWARD:
                nodes[node.forward].append(node)
        return nodes


def takers(graph: OperatorGraph, node: Node) -> tuple[int, ...]:
    """Return the matmuls and attention, of the same part, that use a result of `node`, directly or through views."""
    waiting, kernels, seen = [node], list[int](), set[int]()
    while waiting:
        for output in waiting.pop().outputs:
            for user in graph.consumers.get(output, ()) if output is not None else ():
                reader = graph.nodes[user]
                if reader.part is not node.part or user in seen:
                    continue
                seen.add(user)
                kind = _kind(graph, reader)
                if kind in COMPUTING:
                    kernels.append(user)
                elif kind is Kernel.VIEW:
                    waiting.append(reader)
    return tuple(kernels)


def _kind(graph: OperatorGraph, node: Node) -> Kernel:
    return work(node, graph.values.__getitem__).kernel


class Overlaps:
    """Seconds of collectives that overlap, by the nodes of a function.

    Args:
        pairs: pairs of the graph.
        collective_s: seconds of every node that is a collective.
        kernel_s: seconds of every node that is a matmul or attention.
    """

    def __init__(self, pairs: Sequence[Pair], collective_s: Floats, kernel_s: Floats) -> None:
        self._num_nodes = len(collective_s)
        self._collectives = np.array([pair.collective for pair in pairs], np.int64)
        self._kernels = np.array([kernel for pair in pairs for kernel in pair.kernels], np.int64)
        sizes = [len(pair.kernels) for pair in pairs]
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._kernel_s = kernel_s[self._kernels] * np.repeat([1.0 - pair.alone for pair in pairs], sizes)
        self._most_s = collective_s[self._collectives] * np.array([1.0 - pair.exposed for pair in pairs])

    def hidden_seconds(self, nodes: Ints) -> Floats:
        """Return how many seconds of every node of the graph overlap with others in a function that runs `nodes`.

        A zero follows at the end, index -1, which stands for nodes that are not in the graph. A collective with several
        pairs overlaps with the kernels of one of them.
        """
        runs = np.zeros(self._num_nodes + 1, np.bool_)
        runs[nodes] = True
        computing_s = np.add.reduceat(self._kernel_s * runs[self._kernels], self._starts)
        hidden_s = np.minimum(computing_s, self._most_s) * runs[self._collectives]
        hidden = np.zeros(self._num_nodes + 1)
        np.maximum.at(hidden, self._collectives, hidden_s)
        return hidden
