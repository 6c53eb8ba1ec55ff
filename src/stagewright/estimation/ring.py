"""What ring attention takes beside its kernels: keys and values on their way, and results added up step by step.

Source: `torch.distributed.tensor.experimental._context_parallel._attention` of PyTorch 2.13, as it is by default: keys and
values are gathered at once, in the backward again; parts are balanced for causal masks; what every step computes is added
up in float32 by single operators; in the backward gradients of keys and values go round the ring. Keys and values have a
head for each of the queries', as torchtitan's models repeat them.
Ignores: that the gather runs beside the first step; waits of the ring beyond its last step; that kernels of a step are
smaller than one kernel for all parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.cluster import Cluster, Device, all_gather_seconds
from stagewright.estimation.collectives import slowest_group
from stagewright.estimation.liveness import Lookup
from stagewright.graph import Node
from stagewright.graph.graph import short_name
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.graph.tensor_parallel import CONTEXT_GROUP

_QUERY = {"shared_attention": 0, "shared_attention_backward": 1}
"""Operators, and which of their inputs are the queries; keys and values follow."""

# Passes over the queries in float32, read or written, on the mean of the steps that see half the keys and those that have
# half the queries.
_MERGE = 8.1
"""Of a step: its result in float32, less what there is, times a weight, added; of half the queries a copy of all besides."""
_MERGED = 3.0
"""The first result in float32, and the last in its own type."""
_ADDED = 12.6
"""Of a step of the backward: gradients of keys and values added, put together for the ring, and those of queries added."""
_WHOLE = 7.5
"""Zeros to begin with, and the gradients in their own type."""


def ring_seconds(
    node: Node, value: Lookup, cluster: Cluster, strides: Mapping[str, int], device: Device
) -> float:
    """Of an attention over all parts of a sequence, or its backward, beside its kernel and what the graph gathers; none of
    any other operator."""
    place = _QUERY.get(short_name(node.op))
    if place is None:
        return 0.0
    query, key, values = (value(one).meta for one in node.inputs[place : place + 3])
    size = key.shape[-2] // query.shape[-2]
    if size < 2:
        return 0.0
    in_float32 = query.num_elements * ITEM_BYTES["float32"]
    passes = (size - 1) * _MERGE + _MERGED if place == 0 else size * _ADDED + _WHOLE
    copies = query.shape[1] // key.shape[1]
    whole = key.payload_bytes + values.payload_bytes
    ranks = slowest_group(cluster, size, strides[CONTEXT_GROUP])
    gathered_s = all_gather_seconds(cluster, copies * whole, ranks)
    if place == 0:  # the graph gathers them once
        gathered_s -= all_gather_seconds(cluster, whole, ranks)
    return device.memory_seconds(passes * in_float32) + gathered_s
