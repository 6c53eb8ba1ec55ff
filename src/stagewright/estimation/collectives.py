"""Times of the collectives in a graph of one rank, over the links of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from stagewright.cluster import (
    Cluster,
    Device,
    Tokens,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    dispatch_seconds,
    reduce_scatter_seconds,
)
from stagewright.graph import Node, TensorMeta
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.graph import short_name
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.graph.tensor_parallel import ALL_GATHER, ALL_REDUCE, CONTEXT_GROUP, REDUCE_SCATTER, group_of
from stagewright.graph.views import Lookup

_SECONDS: dict[str, Callable[[Cluster, float, range], float]] = {
    ALL_REDUCE: all_reduce_seconds,
    ALL_GATHER: all_gather_seconds,
    REDUCE_SCATTER: reduce_scatter_seconds,
    ALL_TO_ALL: all_to_all_seconds,
}
_PROBED_BYTES = 2.0**20


def collective_seconds(
    node: Node,
    value: Lookup,
    cluster: Cluster,
    strides: Mapping[str, int],
    multiprocessors: int | None = None,
    scale: float = 1.0,
) -> float:
    """Return the transfer seconds of a collective of the graph; zero for any other operator.

    `strides` are the distances between the ranks of a group, from `stagewright.graph.tensor_parallel.neighbour_strides`.
    With `multiprocessors` that copy them, tokens are sent to every node of their experts once, not once per expert. `scale`
    multiplies the bytes that are sent: for inputs that are cast before, or several samples.

    Source: `stagewright.cluster.collectives` and `stagewright.cluster.dispatch`, for the slowest of the groups of
    neighbouring ranks. Ignores: that groups of one node, replicas and pipeline transfers share links; overlap with
    computations.
    """
    seconds_of = _SECONDS.get(node.op)
    if seconds_of is None:
        return 0.0
    whole = node.outputs[0] if node.op == ALL_GATHER else node.inputs[0]
    assert whole is not None, "a collective has a result"
    name, size = group_of(node)
    ranks = slowest_group(cluster, size, strides[name])
    sent = value(whole).meta
    if node.op == ALL_TO_ALL and multiprocessors is not None:
        return _exchange_seconds(cluster, sent, ranks, node.args[3], multiprocessors)
    return seconds_of(cluster, scale * sent.payload_bytes, ranks)


def _exchange_seconds(
    cluster: Cluster, sent: TensorMeta, ranks: range, copies: int, multiprocessors: int
) -> float:
    """Return the mean seconds of dispatch and combine, since a layer has one of each per direction. The weights and experts
    of tokens are sent with them."""
    if len(sent.shape) < 2 or not sent.shape[0]:
        return 0.0
    tokens = met(cluster, ranks, sent.shape[0] / copies, sent.payload_bytes / sent.shape[0], copies)
    ways = [
        dispatch_seconds(cluster, tokens, ranks, sums=sums, num_multiprocessors=multiprocessors)
        for sums in (False, True)
    ]
    return sum(ways) / 2


def met(cluster: Cluster, ranks: range, num_tokens: float, num_bytes: float, copies: int) -> Tokens:
    """Return `num_tokens` tokens of every rank, with experts on `distinct` numbers of ranks and nodes."""
    num_nodes = len({cluster.node_of(rank) for rank in ranks})
    return Tokens(num_tokens, num_bytes, distinct(copies, len(ranks)), distinct(copies, num_nodes))


def distinct(num_draws: int, num_parts: int) -> float:
    """Return the expected number of parts drawn at least once, of `num_parts` equally likely ones.

    Ignores: that no expert is drawn twice, and groups of experts to which some models limit a token.

    >>> distinct(8, 1), distinct(1, 4), round(distinct(8, 8), 2)
    (1.0, 1.0, 5.25)
    """
    return num_parts * (1 - (1 - 1 / num_parts) ** num_draws)


@lru_cache(maxsize=64)
def slowest_group(cluster: Cluster, num_ranks: int, stride: int = 1) -> range:
    """Return the group of `num_ranks` ranks, `stride` apart, with the slowest links."""
    width = num_ranks * stride
    groups = [
        range(first, first + width, stride) for first in range(0, cluster.num_devices - width + 1, width)
    ]
    return max(groups, key=lambda ranks: all_reduce_seconds(cluster, _PROBED_BYTES, ranks))


_QUERY = {"shared_attention": 0, "shared_attention_backward": 1}
"""Index of the queries among the inputs of an operator; keys and values follow."""

# Passes over the queries in float32, read or written, averaged over the steps that see half the keys and those that have
# half the queries.
_MERGE = 8.1
"""Per step: the result in float32 is weighted and added; for half of the queries also a copy of all."""
_MERGED = 3.0
"""For the first result in float32, and the last in its own type."""
_ADDED = 12.6
"""Per step of the backward: gradients of keys and values are added and packed for the ring, those of queries added."""
_WHOLE = 7.5
"""For zeros at the beginning, and the gradients in their own type."""


def ring_seconds(
    node: Node, value: Lookup, cluster: Cluster, strides: Mapping[str, int], device: Device
) -> float:
    """Return the additional seconds of ring attention over all parts of a sequence, or of its backward, beyond its kernel
    and the gather in the graph: transfers of keys and values, and sums of results. Zero for any other operator.

    Source: `torch.distributed.tensor.experimental._context_parallel._attention` of PyTorch 2.13, with its defaults: keys and
    values are gathered at once, in the backward again; parts are balanced for causal masks; the results of every step are
    added up in float32 by single operators; in the backward gradients of keys and values go around the ring. Keys and values
    have a head for each of the queries', as torchtitan's models repeat them.
    Ignores: that the gather overlaps with the first step; waits of the ring beyond its last step; that kernels of a step are
    smaller than one kernel for all parts.
    """
    place = _QUERY.get(short_name(node.op))
    if place is None:
        return 0.0
    query, key, values = (value(number).meta for number in node.inputs[place : place + 3])
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
