"""Variants of a cluster: another order of ranks, lost devices, measured speeds of devices, slower links."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import ClassVar

from pydantic import model_validator

from stagewright.cluster.cluster import Cluster, MeasuredBandwidth, NodeGroup
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

    def _part_of(self, rank: int) -> int:
        return super()._part_of(self.order[rank] if 0 <= rank < len(self.order) else rank)

    def ranks_of(self, node: int) -> Sequence[int]:
        return self._ranks[node]

    def _numbers(self, src: int, dst: int) -> tuple[int, int]:
        return self.order[src], self.order[dst]


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
    groups = _grouped([cluster.group_of(device) for device in on_node] for on_node in nodes)
    measured = cluster.measured
    if measured is not None:
        chosen = kept if measured.between == "ranks" else [cluster.node_of(on_node[0]) for on_node in nodes]
        matrices = {
            name: matrix and tuple(tuple(matrix[row][column] for column in chosen) for row in chosen)
            for name, matrix in (("bandwidth", measured.bandwidth), ("latency_s", measured.latency_s))
        }
        measured = measured.model_copy(update=matrices)
    return Cluster(
        name=f"{len(kept)} devices of {cluster.name}", nodes=groups, measured=measured,
        collectives=() if lost else cluster.collectives, cores_of_others=cluster.cores_of_others,
    )  # fmt: skip


def with_slower_devices(cluster: Cluster, slowdowns: Mapping[int, float]) -> Cluster:
    """Return `cluster` with the measured slowdown (`Device.pace`) of some devices, by number; the others get the median.

    Devices of similar slowdown get the same one. Where there are several nodes, each is as fast as its slowest device.
    Ignores: slow links.
    """
    middle = median(slowdowns.values())
    of_device = _alike([slowdowns.get(number, middle) for number in range(cluster.num_devices)])
    nodes = [cluster.ranks_of(node) for node in range(cluster.num_nodes)]
    if len(nodes) > 1:
        of_device = [max(of_device[rank] for rank in ranks) for ranks in nodes for _ in ranks]
    slower = (
        [_with_pace(cluster.group_of(device), of_device[device]) for device in devices] for devices in nodes
    )
    return cluster.model_copy(update={"nodes": _grouped(slower)})


def _with_pace(group: NodeGroup, slowdown: float) -> NodeGroup:
    return group.model_copy(update={"device": group.device.model_copy(update={"pace": slowdown})})


def _grouped(nodes: Iterable[Sequence[NodeGroup]]) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes given by the group of each of their devices; equal neighbours become one group."""
    parts = [
        group.model_copy(update={"count": 1, "devices_per_node": len(list(run)), "same_node": number > 0})
        for of_devices in nodes
        for number, (group, run) in enumerate(groupby(of_devices))
    ]
    groups: list[NodeGroup] = []
    for part, run in groupby(parts):
        groups += [part] if part.same_node else [part.model_copy(update={"count": len(list(run))})]
    return tuple(groups)


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
