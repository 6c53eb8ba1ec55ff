"""A cluster whose ranks are on other devices than their own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from pydantic import model_validator

from stagewright.cluster.cluster import Cluster, NodeGroup
from stagewright.cluster.link import Link
from stagewright.errors import InputError


class ArrangedCluster(Cluster):
    """`cluster` as ranks see it when rank `r` has device ``order[r]``; nodes keep their numbers."""

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
        """Node -> its ranks."""
        found: dict[int, list[int]] = {node: [] for node in range(self.num_nodes)}
        for rank in range(self.num_devices):
            found[self.node_of(rank)].append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

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
    """`cluster` as ranks see it when rank `r` has device ``order[r]``; itself for no order or its own.

    A cluster that has an order already loses it.

    Raises:
        InputError: the order does not name every device once.
    """
    if not order or tuple(order) == order_of(cluster):
        return cluster
    figures = {name: getattr(cluster, name) for name in Cluster.model_fields}
    is_own = list(order) == list(range(cluster.num_devices))
    return Cluster(**figures) if is_own else ArrangedCluster(order=tuple(order), **figures)


def order_of(cluster: Cluster) -> tuple[int, ...]:
    """The device of every rank."""
    return cluster.order if isinstance(cluster, ArrangedCluster) else tuple(range(cluster.num_devices))
