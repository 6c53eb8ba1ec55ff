"""Seconds of the collectives that a graph of one tensor-parallel rank holds, over the links of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from stagewright.cluster import (
    Cluster,
    Tokens,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    dispatch_seconds,
    reduce_scatter_seconds,
)
from stagewright.estimation.liveness import Lookup
from stagewright.graph import Node, TensorMeta
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.tensor_parallel import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, group_of

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
    share: float = 1.0,
) -> float:
    """What a collective of the graph takes to send; none for any other operator. `strides` say how far apart the
    ranks of a group are, as `stagewright.graph.tensor_parallel.neighbour_strides`; with so many `multiprocessors` to copy
    them, tokens travel to every node of their experts once, not once for each. Where what is gathered is cast before, a
    `share` of its bytes is sent.

    Source: `stagewright.cluster.collectives` and `stagewright.cluster.dispatch`, for the slowest of the groups of
    neighbouring ranks. Ignores: that groups of one node, replicas and pipeline transfers share links; overlap with
    computations.
    """
    found = _SECONDS.get(node.op)
    if found is None:
        return 0.0
    whole = node.outputs[0] if node.op == ALL_GATHER else node.inputs[0]
    assert whole is not None, "a collective makes what it is for"
    name, size = group_of(node)
    ranks = slowest_group(cluster, size, strides[name])
    sent = value(whole).meta
    if node.op == ALL_TO_ALL and multiprocessors is not None:
        return _exchange_seconds(cluster, sent, ranks, node.args[3], multiprocessors)
    return found(cluster, share * sent.payload_bytes, ranks)


def _exchange_seconds(
    cluster: Cluster, sent: TensorMeta, ranks: range, copies: int, multiprocessors: int
) -> float:
    """Of tokens to their experts or back: the mean of both, since a layer has one of either in each direction. The
    weights and experts of tokens go with these."""
    if len(sent.shape) < 2 or not sent.shape[0]:
        return 0.0
    tokens = met(cluster, ranks, sent.shape[0] / copies, sent.payload_bytes / sent.shape[0], copies)
    ways = [
        dispatch_seconds(cluster, tokens, ranks, sums=sums, num_multiprocessors=multiprocessors)
        for sums in (False, True)
    ]
    return sum(ways) / 2


def met(cluster: Cluster, ranks: range, num_tokens: float, num_bytes: float, copies: int) -> Tokens:
    """So many tokens of every rank, which have experts on as many of the ranks and their nodes as `distinct` says."""
    num_nodes = len({cluster.node_of(rank) for rank in ranks})
    return Tokens(num_tokens, num_bytes, distinct(copies, len(ranks)), distinct(copies, num_nodes))


def distinct(num_draws: int, num_parts: int) -> float:
    """How many of so many equal parts are drawn at least once, on the average.

    Ignores: that no expert is drawn twice, and groups of experts to which some models limit a token.

    >>> distinct(8, 1), distinct(1, 4), round(distinct(8, 8), 2)
    (1.0, 1.0, 5.25)
    """
    return num_parts * (1 - (1 - 1 / num_parts) ** num_draws)


@lru_cache(maxsize=64)
def slowest_group(cluster: Cluster, num_ranks: int, stride: int = 1) -> range:
    """Of the groups of `num_ranks` ranks of a cluster, `stride` apart, the one whose ranks are joined worst."""
    width = num_ranks * stride
    groups = [
        range(first, first + width, stride) for first in range(0, cluster.num_devices - width + 1, width)
    ]
    return max(groups, key=lambda ranks: all_reduce_seconds(cluster, _PROBED_BYTES, ranks))
