"""Times of collectives on a cluster: rings over the slowest edge, trees for the latency between nodes.

A communicator that spans nodes moves its chunks through the node's own links and the network at the same
time, so the slower of the two bounds it (they do not add). Every rank of a node drives its share of the
network adapters.

Source: ring and tree algorithms and their cost in Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 19 (2005); the ring and double-binary-tree choice of
NCCL 2.4. Where the links of a node say what its collectives take (`NodeCollectives`), times inside it are
those of the library by size, and rings over several nodes go through them in its steps and at its rate. A
switch that adds up inside the node halves what an all-reduce sends over the node's links (Klenk et al., "An
In-Network Architecture for Accelerating Shared-Memory Multiprocessor Collectives", ISCA 2020). Where a cluster
has measured curves of all-reduce, all-gather or reduce-scatter, what the links predict is corrected by the
ratio seen on the measured ranks at that size. Ignores: in-network reduction between nodes (SHARP), protocol
switches of the library, contention with other communicators beyond the even split of the adapters, and skew
of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stagewright.cluster.cluster import Cluster
from stagewright.cluster.link import Link, NodeCollectives
from stagewright.cluster.measured import Operation, between

_T = TypeVar("_T")

TREE_BANDWIDTH = 0.5
"""Fraction of the ring's bandwidth that a tree of nodes attains: its inner nodes receive from two children.
The lower end of what NCCL's tuning tables assume by size (0.5 to 0.9); four measured H100 nodes are slower
still.
"""

_CROWD_S = 1.0e-6
"""Additional seconds of a step of a ring over several nodes for every further rank of a node: every adapter has its own
ring, whose chunks wait for each other in every device. Fit of NCCL's times by size on ten H100 nodes published in
github.com/xxrjun/nccl-tests-cluster (455de4f), half of the rows.
"""

_CROWDED_PART = 1e5
"""Bytes of a rank's part at which half of that applies. The same fit."""

_MESSAGE_S = 5e-6
"""Seconds of one more message in flight to a rank of another node, in an all-to-all. The same fit."""

_MESSAGE_CHUNK = 2.0**17
"""Bytes that a message to another node moves at once; smaller messages have more in flight. Source: NCCL, the default of
NCCL_P2P_NET_CHUNKSIZE.
"""

_NODE_CHANNELS = 32
"""Maximum number of channels of a message inside a node, each served by a multiprocessor; the ranks of a communicator share
them. Source: NCCL 2.30, `ncclTopoComputeP2pChannels` and `scheduleP2pTasksToPlan`, on an H100 node.
"""

_NODE_PART = 2.0**24
"""Bytes per channel above which their number is doubled. Source: NCCL 2.30, `addP2pToPlan`."""

_NODE_CHANNEL = 20.4e9
"""Bytes/s of one channel. Fit of messages around eight H100 published in github.com/xxrjun/nccl-tests-cluster (455de4f),
half of the rows.
"""

_NETWORK_CHANNELS, _FEW_NODES = 2, 8
"""Channels of a message to another node, and the number of nodes above which a communicator has only one. Source: as
above."""

_NETWORK_CHANNEL = 25.5e9
"""Bytes/s of one network channel. The same fit, on ten nodes."""

_REDUCED_TRAFFIC = 0.5
"""Traffic of an all-reduce over a node's links with reduction in the switch, relative to a ring. Source: the module."""


@dataclass(frozen=True)
class Communicator:
    """A communicator of `size` ranks, at most `per_node` on each of `num_nodes`, and its slowest edges."""

    size: int
    per_node: int
    num_nodes: int
    intra: Link | None
    inter_latency_s: float
    inter_bandwidth: float
    """Bytes/s of all ranks of a node together, over the slowest edge of the ring of nodes."""

    @property
    def collectives(self) -> NodeCollectives | None:
        """Model of collectives inside one node; None for a group on several nodes or if it is unknown."""
        return self.intra.collectives if self.intra is not None and self.num_nodes == 1 else None

    @property
    def node(self) -> NodeCollectives | None:
        """Model of collectives inside the nodes; None if it is unknown."""
        return self.intra.collectives if self.intra is not None else None

    def ring_bandwidth(self, reduces: bool = False) -> float:
        """Return bytes/s of the slowest edge of a ring that enters and leaves every node once; `reduces`: an all-reduce."""
        if self.intra is None:
            return self.inter_bandwidth
        if self.node is None:
            return min(self.intra.group_bandwidth(self.per_node), self.inter_bandwidth)
        inside = self.node.ring_bandwidth(self.per_node)
        if reduces and self.node.adds_in_switch(self.per_node):
            inside /= _REDUCED_TRAFFIC
        return min(inside, self.inter_bandwidth)

    @property
    def intra_latency_s(self) -> float:
        return self.intra.latency_s if self.intra else 0.0

    @property
    def step_s(self) -> float:
        """Seconds from one rank of a node to the next in a ring."""
        return self.node.step_s if self.node else self.intra_latency_s

    def ring_latency_s(self, num_bytes: float) -> float:
        """Return the seconds of one pass of a chunk around the ring; each rank's part is a chunk."""
        crossings = self.num_nodes - 1
        latency_s = (self.size - 1 - crossings) * self.step_s + crossings * self.inter_latency_s
        return latency_s + self.crowd_s(self.size - 1, num_bytes / self.size)

    def crowd_s(self, num_steps: int, part: float) -> float:
        """Return the additional seconds of `num_steps` steps with `part` bytes because rings of several adapters share
        devices."""
        if self.node is None or self.num_nodes < 2:
            return 0.0
        return num_steps * _CROWD_S * (self.per_node - 1) * part / (part + _CROWDED_PART)

    def tree_latency_s(self, num_bytes: float) -> float:
        """Return the seconds of one pass of a chunk along a chain inside the node and up a binary tree of nodes; every
        adapter has a tree."""
        levels, chain = math.ceil(math.log2(self.num_nodes)), self.per_node - 1
        latency_s = chain * self.step_s + levels * self.inter_latency_s
        return latency_s + self.crowd_s(chain + levels, num_bytes / self.per_node)


def communicator(cluster: Cluster, ranks: Sequence[int]) -> Communicator:
    """Return the communicator of `ranks`, computed once per cluster."""
    key = _first_alike(cluster, ranks) if isinstance(ranks, range) else tuple(ranks)
    groups = cluster.known_groups
    if key not in groups:
        groups[key] = _build(cluster, key)
    return groups[key]


def _first_alike(cluster: Cluster, ranks: range) -> range:
    """Return the first ranks of a uniform cluster with the same positions as `ranks`; `ranks` if the cluster lacks some."""
    if (
        not cluster.is_uniform
        or ranks.step < 1
        or not ranks
        or ranks[0] < 0
        or ranks[-1] >= cluster.num_devices
    ):
        return ranks
    first = ranks[0] % cluster.nodes[0].devices_per_node
    return range(first, first + len(ranks) * ranks.step, ranks.step)


def _build(cluster: Cluster, ranks: Sequence[int]) -> Communicator:
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(cluster.node_of(rank), []).append(rank)
    members = list(by_node.values())
    rings = [_slowest(cluster, ring) for ring in members if len(ring) > 1]
    intra = rings[0] if rings else None
    for ring in rings[1:]:
        intra = ring.slower(intra) if intra else ring
    edges = [_edge(cluster, a, b) for a, b in _closed(members)]
    return Communicator(
        size=len(ranks),
        per_node=max(len(ring) for ring in members),
        num_nodes=len(members),
        intra=intra,
        inter_latency_s=max((latency for latency, _ in edges), default=0.0),
        inter_bandwidth=min((bandwidth for _, bandwidth in edges), default=math.inf),
    )


def _closed(items: list[_T]) -> list[tuple[_T, _T]]:
    return [(items[i], items[(i + 1) % len(items)]) for i in range(len(items))] if len(items) > 1 else []


def _slowest(cluster: Cluster, ring: list[int]) -> Link:
    links = [cluster.link_between(a, b) for a, b in _closed(ring)]
    slowest = links[0]
    for link in links[1:]:
        if link is not slowest:
            slowest = slowest.slower(link)
    return slowest


def _edge(cluster: Cluster, senders: list[int], receivers: list[int]) -> tuple[float, float]:
    """Return latency and total bandwidth from one node to the next, with one flow per rank."""
    links = [cluster.link_between(a, b) for a, b in zip(senders, receivers, strict=False)]
    return max(link.latency_s for link in links), sum(link.bandwidth for link in links)


def all_gather_seconds(cluster: Cluster, num_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds until every rank holds all of `num_bytes`, of which each contributes an equal part (ring).

    Source and ignores: the module.
    """
    return _one_way(cluster, num_bytes, ranks, "all-gather")


def _one_way(cluster: Cluster, num_bytes: float, ranks: Sequence[int], operation: Operation) -> float:
    if len(ranks) < 2:
        return 0.0
    group = communicator(cluster, ranks)
    return _as_measured(cluster, operation, _ring_seconds, num_bytes, group)


def _ring_seconds(group: Communicator, num_bytes: float) -> float:
    if (inside := group.collectives) is not None:
        return inside.seconds("one way", group.size, num_bytes)
    volume_s = (group.size - 1) / group.size * num_bytes / group.ring_bandwidth()
    return group.ring_latency_s(num_bytes) + volume_s


def _as_measured(
    cluster: Cluster,
    operation: Operation,
    modelled: Callable[[Communicator, float], float],
    num_bytes: float,
    group: Communicator,
) -> float:
    """Return the modelled seconds, corrected by the ratio of measured to modelled seconds at that size."""
    seconds = modelled(group, num_bytes)
    if not cluster.collectives or num_bytes <= 0:
        return seconds
    span = "cluster" if group.num_nodes > 1 else "node"
    for curve in cluster.collectives:
        if curve.operation == operation and curve.spans == span:
            whole = communicator(
                cluster, range(cluster.num_devices) if span == "cluster" else cluster.ranks_of(0)
            )
            pairs = zip(curve.num_bytes, curve.seconds, strict=True)
            ratios = tuple(taken / modelled(whole, size) for size, taken in pairs)
            return seconds * between(curve.num_bytes, ratios, num_bytes)
    return seconds


def reduce_scatter_seconds(cluster: Cluster, num_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds until each rank holds its part of the sum of every rank's `num_bytes` (ring).

    Source: the module; an all-gather with its arrows reversed. Ignores: the module's, and the additions.
    """
    return _one_way(cluster, num_bytes, ranks, "reduce-scatter")


def all_reduce_seconds(cluster: Cluster, num_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds until every rank holds the sum of every rank's `num_bytes`.

    A reduce-scatter and an all-gather around a ring, or a reduction and a broadcast along a tree: the faster.
    Source: the module. Ignores: the module's, and the additions.
    """
    if len(ranks) < 2:
        return 0.0
    return _as_measured(cluster, "all-reduce", _all_reduce_seconds, num_bytes, communicator(cluster, ranks))


def _all_reduce_seconds(group: Communicator, num_bytes: float) -> float:
    if (inside := group.collectives) is not None:
        return inside.seconds("all-reduce", group.size, num_bytes)
    volume_s = (group.size - 1) / group.size * num_bytes / group.ring_bandwidth(reduces=True)
    ring = group.ring_latency_s(num_bytes) + volume_s
    tree = group.tree_latency_s(num_bytes) + volume_s / TREE_BANDWIDTH
    return 2 * min(ring, tree)


def all_to_all_seconds(cluster: Cluster, num_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds until each rank has sent an equal part of its `num_bytes` to every rank (its own part stays).

    Parts to the own node and parts to other nodes move at the same time. Source: the module (messages of the logarithmic
    algorithm, volume of the pairwise one), and a cost of every message to another node if the nodes have a model of
    collectives. Ignores: the module's.
    """
    if len(ranks) < 2:
        return 0.0
    group = communicator(cluster, ranks)
    if group.collectives is not None:
        return group.collectives.seconds("all to all", group.size, num_bytes)
    part = num_bytes / group.size
    inside = part * (group.per_node - 1) / group.intra.collective_bandwidth if group.intra else 0.0
    outside = part * (group.size - group.per_node) * group.per_node / group.inter_bandwidth
    rounds = math.ceil(math.log2(group.size))
    messages = (group.size - group.per_node) * part / (part + _MESSAGE_CHUNK) if group.node else 0.0
    latency_s = rounds * max(group.intra_latency_s, group.inter_latency_s) + _MESSAGE_S * messages
    return latency_s + max(inside, outside)


def ring_shift_seconds(cluster: Cluster, num_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds until each rank has `num_bytes` of the previous one, around a ring and in one communicator.

    The library uses few channels per message if a communicator has many ranks, each of which could send to every other one;
    two ranks with their own communicator, as PyTorch creates for every pair that sends without batching, have the whole link
    (`Cluster.point_to_point_seconds`).

    Source: NCCL 2.30, `src/enqueue.cc` and `src/graph/paths.cc`. Ignores: the protocol of small messages; that messages
    inside a node have few channels too where others leave it; other communicators.
    """
    if len(ranks) < 2:
        return 0.0
    num_nodes = communicator(cluster, ranks).num_nodes
    inside = math.inf if num_nodes > 1 else _inside_bandwidth(num_bytes, len(ranks))
    outside = _NETWORK_CHANNEL * (_NETWORK_CHANNELS if num_nodes <= _FEW_NODES else 1)
    slowest_s = 0.0
    for a, b in _closed([*ranks]):
        link = cluster.link_between(a, b, 1)
        channels = inside if cluster.node_of(a) == cluster.node_of(b) else outside
        slowest_s = max(slowest_s, link.latency_s + num_bytes / min(link.bandwidth, channels))
    return slowest_s


def _inside_bandwidth(num_bytes: float, num_ranks: int) -> float:
    """Return bytes/s of the channels of a message in a communicator of `num_ranks` ranks of one node."""
    channels = max(1, _NODE_CHANNELS // 2 ** math.ceil(math.log2(num_ranks)))
    while channels < _NODE_CHANNELS and num_bytes > channels * _NODE_PART:
        channels *= 2
    return channels * _NODE_CHANNEL
