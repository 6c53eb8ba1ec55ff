"""Clusters: devices in nodes, nodes on a network, and the links between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stagewright.cluster.device import Device
from stagewright.cluster.host import Host
from stagewright.cluster.link import Link
from stagewright.cluster.measured import MeasuredCollective
from stagewright.cluster.profile import OperatorProfile
from stagewright.cluster.schema import SourcedModel
from stagewright.errors import InputError
from stagewright.limits import LEAST_RATE, MOST_DEVICES, MOST_RATE, MOST_SECONDS


def measurement_cautions(cores_of_others: float | None) -> list[str]:
    """Return a caution about a measurement during which other programs used cores; empty if none did."""
    if cores_of_others is None:
        return []
    return [
        f"other processes used {cores_of_others:.1f} of the cores while this was measured; results are pessimistic: measure "
        "again when they have ended"
    ]


class NodeGroup(SourcedModel):
    """`count` equal nodes; each has `devices_per_node` devices and `num_nics` network adapters.

    A node with several kinds of devices is a group for each kind, of which all but the first are in the `same_node`.
    """

    not_figures: ClassVar[frozenset[str]] = frozenset({"count", "same_node"})

    count: int = Field(default=1, ge=1, le=MOST_DEVICES)
    same_node: bool = False
    """Whether these devices are in the last node of the group before, and share its adapters and host."""
    devices_per_node: int = Field(ge=1, le=MOST_DEVICES)
    num_nics: int = Field(ge=1, le=MOST_DEVICES)
    device: Device
    intra_node: Link
    """Link between two devices of the node, per device."""
    inter_node: Link
    """Link of one network adapter."""
    host: Host | None = None
    """The node's CPUs; None if nothing may be placed on them."""

    def __hash__(self) -> int:
        return hash((self.count, self.devices_per_node, self.num_nics, self.device, self.intra_node))

    def network_share(self, num_flows: int) -> Link:
        """Return the link of each of `num_flows` concurrent messages that leave one node: at most one adapter."""
        return self.inter_node.shared(num_flows / self.num_nics)


class MeasuredBandwidth(SourcedModel):
    """Attained bandwidth of every ordered pair, row = sender, in bytes/s; the diagonal is not read.

    Between `nodes` an entry is the bandwidth of one device while every device of its node sends to the other node; between
    `ranks` it is that of the pair, also inside a node.
    """

    not_figures: ClassVar[frozenset[str]] = frozenset({"between"})

    between: Literal["nodes", "ranks"] = "nodes"
    bandwidth: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...] | None = None

    @model_validator(mode="after")
    def _square_and_positive(self) -> MeasuredBandwidth:
        size = len(self.bandwidth)
        for name, matrix in (("bandwidth", self.bandwidth), ("latency_s", self.latency_s)):
            for i, row in enumerate(matrix or ()):
                if len(row) != size or len(matrix or ()) != size:
                    raise ValueError(
                        f"{name} must be a square matrix: row {i} has {len(row)} of {size} entries"
                    )
                least, most = (LEAST_RATE, MOST_RATE) if matrix is self.bandwidth else (0.0, MOST_SECONDS)
                for j, value in enumerate(row):
                    if i != j and not least <= value <= most:
                        raise ValueError(f"{name}[{i}][{j}] = {value!r}: must be from {least:g} to {most:g}")
        return self

    def applied(self, link: Link, ranks: tuple[int, int], nodes: tuple[int, int]) -> Link:
        """Return `link` from sender to receiver (given as ranks and as nodes) with the measured figures instead."""
        i, j = ranks if self.between == "ranks" else nodes
        if i == j:
            return link
        latency = self.latency_s[i][j] if self.latency_s else link.latency_s
        return Link.model_construct(latency_s=latency, bandwidth=self.bandwidth[i][j], ring_bandwidth=None)


class Cluster(SourcedModel):
    """A cluster of nodes. Ranks 0, 1, ... number the devices node by node, in the order of `nodes`."""

    not_figures: ClassVar[frozenset[str]] = frozenset({"name", "nodes", "collectives", "cores_of_others"})

    def __repr__(self) -> str:
        """Show name and nodes; the whole description is long."""
        parts = (
            f"{'' if group.same_node else f'{group.count} x '}{group.devices_per_node} {group.device.name}"
            for group in self.nodes
        )
        joined = "".join(
            f"{' + ' if group.same_node else ', '}{part}"
            for group, part in zip(self.nodes, parts, strict=True)
        )
        return f"<Cluster {self.name}: {joined.removeprefix(', ')}>"

    __str__ = __repr__

    name: str = Field(min_length=1)
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    measured: MeasuredBandwidth | None = None
    collectives: tuple[MeasuredCollective, ...] = ()
    """Measured curves that correct the times of collectives predicted from the links."""
    cores_of_others: float | None = Field(default=None, gt=0, le=MOST_DEVICES)
    """Cores that other programs used during the measurement; None if there were none, or nothing was measured."""

    def __hash__(self) -> int:
        return hash((self.name, self.nodes))

    @property
    def cautions(self) -> list[str]:
        """Warnings about the figures of this cluster for users who plan with it."""
        return [f"cluster '{self.name}': {caution}" for caution in measurement_cautions(self.cores_of_others)]

    @model_validator(mode="after")
    def _possible_size(self) -> Cluster:
        count = sum(group.count * group.devices_per_node for group in self.nodes)
        if count > MOST_DEVICES:
            raise ValueError(
                f"{count:,} devices are more than the {MOST_DEVICES:,} of any cluster: give fewer"
            )
        return self

    @model_validator(mode="after")
    def _shared_nodes(self) -> Cluster:
        for number, group in enumerate(self.nodes):
            if group.same_node and (number == 0 or group.count > 1):
                raise ValueError(
                    f"nodes[{number}] has same_node = true, which means the node of the group before it: give it count = 1 "
                    "and a group before it, or leave same_node out"
                )
        return self

    @model_validator(mode="after")
    def _measured_size(self) -> Cluster:
        if self.measured is not None:
            size = len(self.measured.bandwidth)
            wanted = self.num_nodes if self.measured.between == "nodes" else self.num_devices
            if size != wanted:
                raise ValueError(
                    f"measured.bandwidth has {size} rows but the cluster has {wanted} "
                    f"{self.measured.between}: give one row and one column for each"
                )
        return self

    @model_validator(mode="after")
    def _collectives_of_all(self) -> Cluster:
        for curve in self.collectives:
            wanted = self.num_devices if curve.spans == "cluster" else len(self.ranks_of(0))
            if curve.num_ranks != wanted:
                raise ValueError(
                    f"collectives: {curve.operation} over the {curve.spans} was measured on {curve.num_ranks} ranks, but "
                    f"there are {wanted}: measure on all of them, or leave it out"
                )
        return self

    @property
    def num_devices(self) -> int:
        return self._first_ranks[-1]

    @cached_property
    def num_nodes(self) -> int:
        return self._node_of_part[-1] + 1

    @cached_property
    def _parts(self) -> tuple[NodeGroup, ...]:
        """The group of every part of a node with equal devices, which is all of the node if it has one kind."""
        return tuple(group for group in self.nodes for _ in range(group.count))

    @cached_property
    def _node_of_part(self) -> tuple[int, ...]:
        return tuple(accumulate((not part.same_node for part in self._parts[1:]), initial=0))

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """First rank of every part, then the number of ranks."""
        return (0, *accumulate(part.devices_per_node for part in self._parts))

    @cached_property
    def _ranks_of_node(self) -> tuple[range, ...]:
        firsts = [
            first for first, part in zip(self._first_ranks, self._parts, strict=False) if not part.same_node
        ]
        return tuple(starmap(range, pairwise((*firsts, self.num_devices))))

    @property
    def is_homogeneous(self) -> bool:
        """Whether every rank has the same device."""
        return all(group.device == self.nodes[0].device for group in self.nodes)

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """The device type whose kernels a model is traced with: that of accelerators if there are any."""
        return "cuda" if any(group.device.kind == "cuda" for group in self.nodes) else "cpu"

    @property
    def device(self) -> Device:
        """The device of a homogeneous cluster; raises `InputError` for a mixed one (use `device_of`)."""
        if not self.is_homogeneous:
            names = ", ".join(dict.fromkeys(group.device.name for group in self.nodes))
            raise InputError(
                f"cluster '{self.name}' mixes devices ({names}): this needs equal devices; "
                "choose a part of the cluster with one kind of device"
            )
        return self.nodes[0].device

    def with_profile(self, profile: OperatorProfile) -> Cluster:
        """Return this cluster with measured operator times for its devices of the profile's kind, scaled to the speed that
        the machine had when it was probed, if both speeds are known.

        Raises:
            InputError: the cluster has no such device, several different ones, or another number of threads per process.
        """
        devices = list(
            dict.fromkeys(group.device for group in self.nodes if group.device.kind == profile.kind)
        )
        described = f"the profile is of a {profile.kind} device ({profile.device})"
        if len(devices) != 1:
            names = ", ".join(device.name for device in devices) or f"none of kind {profile.kind}"
            raise InputError(
                f"{described}, but cluster '{self.name}' has {names}: profile the model on the cluster's device, or name a "
                "cluster with one such device"
            )
        (device,) = devices
        if (
            None not in (device.num_threads, profile.num_threads)
            and device.num_threads != profile.num_threads
        ):
            raise InputError(
                f"{described} with {profile.num_threads} threads a process, but a process of cluster '{self.name}' has "
                f"{device.num_threads}: profile with as many processes as the cluster was probed with"
            )
        profiled = device.model_copy(update={"profile": profile.at_speed(device.reference_s)})
        groups = tuple(
            group.model_copy(update={"device": profiled}) if group.device == device else group
            for group in self.nodes
        )
        return self.model_copy(update={"nodes": groups})

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are equal, have no measured links, and hold neighbouring ranks."""
        return not self.nodes[1:] and self.measured is None

    def _part_of(self, rank: int) -> int:
        """Return the part of a node that holds `rank`; raise `InputError` for a rank outside the cluster."""
        if not 0 <= rank < self.num_devices:
            raise InputError(
                f"rank {rank} is outside cluster '{self.name}', whose ranks are 0 to {self.num_devices - 1}"
            )
        return bisect_right(self._first_ranks, rank) - 1

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`; raise `InputError` for a rank outside the cluster."""
        return self._node_of_part[self._part_of(rank)]

    def ranks_of(self, node: int) -> Sequence[int]:
        """Return the ranks on `node`."""
        return self._ranks_of_node[node]

    def group_of(self, rank: int) -> NodeGroup:
        """Return the group of nodes that holds `rank`."""
        return self._parts[self._part_of(rank)]

    def device_of(self, rank: int) -> Device:
        """Return the device of `rank`."""
        return self.group_of(rank).device

    def kinds_of(self, ranks: Iterable[int]) -> tuple[Device, ...]:
        """Return the devices of `ranks`, equal ones once, in the order of the ranks."""
        parts = dict.fromkeys(map(self._part_of, ranks))
        return tuple(dict.fromkeys(self._parts[part].device for part in parts))

    def link_between(self, src: int, dst: int, flows_per_node: int | None = None) -> Link:
        """Return the link of a message from rank `src` to rank `dst`.

        `flows_per_node` is the number of messages that leave (or enter) the node over its network adapters at the same
        time; by default every device of the node sends one. A measured bandwidth overrides the description and ignores this
        number.
        """
        a, b = self._part_of(src), self._part_of(dst)
        link = self._links.get((a, b, flows_per_node))
        if link is None:
            link = self._links[a, b, flows_per_node] = self._described_link(a, b, flows_per_node)
        if self.measured is None:
            return link
        return self.measured.applied(
            link, self._numbers(src, dst), (self._node_of_part[a], self._node_of_part[b])
        )

    def _numbers(self, src: int, dst: int) -> tuple[int, int]:
        """Return the numbers of the devices of two ranks."""
        return src, dst

    @cached_property
    def _links(self) -> dict[tuple[int, int, int | None], Link]:
        """Cache of links between parts of nodes: searches need the same ones many thousand times."""
        return {}

    def _described_link(self, a: int, b: int, flows_per_node: int | None) -> Link:
        ends = [self._parts[part] for part in (a, b)]
        if a == b:
            return ends[0].intra_node
        nodes = [self._node_of_part[part] for part in (a, b)]
        if nodes[0] == nodes[1]:
            return ends[0].intra_node.slower(ends[1].intra_node)
        sizes = [len(self._ranks_of_node[node]) for node in nodes]
        shares = [end.network_share(flows_per_node or size) for end, size in zip(ends, sizes, strict=True)]
        return shares[0].slower(shares[1])

    def point_to_point_seconds(self, num_bytes: float, src: int, dst: int) -> float:
        """Return the seconds of one message of `num_bytes` from `src` to `dst`; zero from a rank to itself.

        Source and ignores: `Link.seconds`.
        """
        return 0.0 if src == dst else self.link_between(src, dst).seconds(num_bytes)

    def blocks_seconds(self, num_bytes: float, src: int, dst: int, width: int) -> float:
        """Return the seconds of the slowest of `width` concurrent messages of `num_bytes`, from ranks `src`, `src` + 1, ...
        to `dst`, `dst` + 1, ...; zero from ranks to themselves.

        Source and ignores: `Link.seconds`.
        """
        return 0.0 if src == dst else max(link.seconds(num_bytes) for link in self._links_of(src, dst, width))

    def _links_of(self, src: int, dst: int, width: int) -> tuple[Link, ...]:
        """Return the distinct links between two blocks of ranks."""
        links = self._block_links.get((src, dst, width))
        if links is None:
            pairs = ((src + index, dst + index) for index in range(width))
            links = tuple(dict.fromkeys(self.link_between(*pair) for pair in pairs))
            self._block_links[src, dst, width] = links
        return links

    @cached_property
    def known_groups(self) -> dict[Any, Any]:
        """Cache of `stagewright.cluster.collectives` for groups of ranks."""
        return {}

    @cached_property
    def _block_links(self) -> dict[tuple[int, int, int], tuple[Link, ...]]:
        """Cache of links between blocks of ranks."""
        return {}
