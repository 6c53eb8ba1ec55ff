"""Variants of a cluster: another order of ranks, lost devices, measured speeds of devices, slower links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import ClassVar

from pydantic import model_validator

from stagewright.cluster.cluster import Cluster, MeasuredBandwidth, NodeGroup
from stagewright.cluster.link import Link
from stagewright.errors import InputError

_ALIKE = 1.1
"""Devices whose slowdowns differ by a smaller factor count as equally fast: it is the noise of a run."""


class ArrangedCluster(Cluster):
    """A cluster whose rank `r` has device ``order[r]``; nodes keep their numbers."""

    not_figures: ClassVar[frozenset[str]] = Cluster.not_figures | {"order"}

    order: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.order))

    @model_validator(mode="after")
    def _names_every_device_once(self) -> ArrangedCluster:
        if sorted(self.order) != list(range(self.num_devices)):
            raise InputError(
                f"the order of devices must name each of the {self.num_devices} devices of cluster '{self.name}' once"
            )
        return self

    @cached_property
    def _ranks(self) -> dict[int, tuple[int, ...]]:
        """Ranks of each node."""
        ranks_of: dict[int, list[int]] = {node: [] for node in range(self.num_nodes)}
        for rank in range(self.num_devices):
            ranks_of[self.node_of(rank)].append(rank)
        return {node: tuple(ranks) for node, ranks in ranks_of.items()}

    @property
    def is_uniform(self) -> bool:
        return False

    def node_of(self, rank: int) -> int:
        return super().node_of(self.order[rank] if 0 <= rank < len(self.order) else rank)

    def ranks_of(self, node: int) -> Sequence[int]:
        return self._ranks[node]

    def group_of(self, rank: int) -> NodeGroup:
        return self._groups_by_node[self.node_of(rank)]

    def link_between(self, src: int, dst: int, flows_per_node: int | None = None) -> Link:
        link = self._link_of_nodes(self.node_of(src), self.node_of(dst), flows_per_node)
        devices = self.order[src], self.order[dst]
        nodes = self.node_of(src), self.node_of(dst)
        return link if self.measured is None else self.measured.applied(link, devices, nodes)


def arranged(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """Return `cluster` with device ``order[r]`` for rank `r`; `cluster` itself for an empty or unchanged order.

    The new order replaces an earlier one.

    Raises:
        InputError: the order does not name every device once.
    """
    if not order or tuple(order) == order_of(cluster):
        return cluster
    figures = {name: getattr(cluster, name) for name in Cluster.model_fields}
    is_own = list(order) == list(range(cluster.num_devices))
    return Cluster(**figures) if is_own else ArrangedCluster(order=tuple(order), **figures)


def order_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the device of every rank."""
    return cluster.order if isinstance(cluster, ArrangedCluster) else tuple(range(cluster.num_devices))


def without(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """Return `cluster` without the devices `lost` (numbers); the others keep their order, and empty nodes are dropped.

    Measured bandwidths of the remaining devices and nodes are kept; curves of collectives are dropped, because they were
    measured with all devices. A node keeps its network adapters.
    """
    kept = [device for device in range(cluster.num_devices) if device not in lost]
    nodes = [list(on_node) for _, on_node in groupby(kept, cluster.node_of)]
    shrunk = [
        cluster.group_of(on_node[0]).model_copy(update={"count": 1, "devices_per_node": len(on_node)})
        for on_node in nodes
    ]
    groups: list[NodeGroup] = []
    for group, run in groupby(shrunk):
        groups.append(group.model_copy(update={"count": len(list(run))}))
    measured = cluster.measured
    if measured is not None:
        chosen = kept if measured.between == "ranks" else [cluster.node_of(on_node[0]) for on_node in nodes]
        matrices = {
            name: matrix and tuple(tuple(matrix[row][column] for column in chosen) for row in chosen)
            for name, matrix in (("bandwidth", measured.bandwidth), ("latency_s", measured.latency_s))
        }
        measured = measured.model_copy(update=matrices)
    return Cluster(
        name=f"{len(kept)} devices of {cluster.name}", nodes=tuple(groups), measured=measured,
        collectives=() if lost else cluster.collectives, cores_of_others=cluster.cores_of_others,
    )  # fmt: skip


def with_slower_devices(cluster: Cluster, slowdowns: Mapping[int, float]) -> Cluster:
    """Return `cluster` with the measured slowdown (`Device.pace`) of some devices, by number; the others get the median.

    Devices of similar slowdown get the same one. A node is as fast as its slowest device; if the cluster is one node, its
    devices become separate nodes joined by the same links. Ignores: slow links.
    """
    middle = median(slowdowns.values())
    of_device = _alike([slowdowns.get(number, middle) for number in range(cluster.num_devices)])
    if cluster.num_nodes == 1:
        return _divided(cluster, of_device)
    of_node = [max(of_device[rank] for rank in cluster.ranks_of(node)) for node in range(cluster.num_nodes)]
    kinds = [(cluster.group_of(cluster.ranks_of(node)[0]), slowdown) for node, slowdown in enumerate(of_node)]
    groups = [_group(group, slowdown, count=len(list(run))) for (group, slowdown), run in groupby(kinds)]
    return cluster.model_copy(update={"nodes": tuple(groups)})


def _divided(cluster: Cluster, of_device: list[float]) -> Cluster:
    (node,) = cluster.nodes
    if len(set(of_device)) == 1:
        return cluster.model_copy(update={"nodes": (_group(node, of_device[0], count=1),)})
    groups = []
    for slowdown, run in groupby(of_device):
        size = len(list(run))
        part = {"devices_per_node": size, "num_nics": size, "inter_node": node.intra_node}
        groups.append(_group(node, slowdown, count=1).model_copy(update=part))
    return cluster.model_copy(update={"nodes": tuple(groups)})


def _group(node: NodeGroup, slowdown: float, count: int) -> NodeGroup:
    return node.model_copy(
        update={"count": count, "device": node.device.model_copy(update={"pace": slowdown})}
    )


def _alike(slowdowns: list[float]) -> list[float]:
    """
    >>> _alike([1.0, 1.5, 1.04, 1.52])
    [1.02, 1.51, 1.02, 1.51]
    """
    classes: list[list[int]] = []
    for number in sorted(range(len(slowdowns)), key=slowdowns.__getitem__):
        if classes and slowdowns[number] < _ALIKE * slowdowns[classes[-1][0]]:
            classes[-1].append(number)
        else:
            classes.append([number])
    middle_slowdowns = list(slowdowns)
    for members in classes:
        middle = round(median(slowdowns[number] for number in members), 4)
        for number in members:
            middle_slowdowns[number] = middle
    return middle_slowdowns


def with_slower_links(cluster: Cluster, factors: Mapping[tuple[int, int], float]) -> Cluster:
    """Return `cluster` with messages between given pairs of devices (numbers) slower by the given factors, both ways.

    Ignores: that links of the same adapters slow down together, unless each is given; curves of collectives, which are
    dropped.
    """
    if not factors:
        return cluster
    both = {**factors, **{(b, a): factor for (a, b), factor in factors.items()}}
    devices = range(cluster.num_devices)
    links = [[cluster.link_between(a, b) for b in devices] for a in devices]
    measured = MeasuredBandwidth(
        between="ranks",
        bandwidth=tuple(
            tuple(links[a][b].bandwidth / both.get((a, b), 1.0) for b in devices) for a in devices
        ),
        latency_s=tuple(
            tuple(links[a][b].latency_s * both.get((a, b), 1.0) for b in devices) for a in devices
        ),
    )
    return cluster.model_copy(update={"measured": measured, "collectives": ()})
