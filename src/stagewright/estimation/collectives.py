"""Seconds of the collectives that a graph of one tensor-parallel rank holds, over the links of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from stagewright.cluster import (
    Cluster,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from stagewright.estimation.liveness import Lookup
from stagewright.graph import Node
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.tensor_parallel import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, group_of

_SECONDS: dict[str, Callable[[Cluster, float, range], float]] = {
    ALL_REDUCE: all_reduce_seconds,
    ALL_GATHER: all_gather_seconds,
    REDUCE_SCATTER: reduce_scatter_seconds,
    ALL_TO_ALL: all_to_all_seconds,
}
_PROBED_BYTES = 2.0**20


def collective_seconds(node: Node, value: Lookup, cluster: Cluster, strides: Mapping[str, int]) -> float:
    """What a collective of the graph takes to send; none for any other operator. `strides` say how far apart the
    ranks of a group are, as `stagewright.graph.tensor_parallel.neighbour_strides`.

    Source: `stagewright.cluster.collectives`, for the slowest of the groups of neighbouring ranks. Ignores: that
    groups of one node, replicas and pipeline transfers share links; overlap with computations.
    """
    found = _SECONDS.get(node.op)
    if found is None:
        return 0.0
    whole = node.outputs[0] if node.op == ALL_GATHER else node.inputs[0]
    assert whole is not None, "a collective makes what it is for"
    name, size = group_of(node)
    ranks = slowest_group(cluster, size, strides[name])
    return found(cluster, float(value(whole).meta.payload_bytes), ranks)


@lru_cache(maxsize=64)
def slowest_group(cluster: Cluster, num_ranks: int, stride: int = 1) -> range:
    """Of the groups of `num_ranks` ranks of a cluster, `stride` apart, the one whose ranks are joined worst."""
    width = num_ranks * stride
    groups = [
        range(first, first + width, stride) for first in range(0, cluster.num_devices - width + 1, width)
    ]
    return max(groups, key=lambda ranks: all_reduce_seconds(cluster, _PROBED_BYTES, ranks))
