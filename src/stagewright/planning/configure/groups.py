"""Clocks where the links of one group of ranks are not those of another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.cluster import Cluster
from stagewright.cluster.arranged import ArrangedCluster
from stagewright.estimation.megatron import Layout
from stagewright.estimation.megatron.kernels import Collective
from stagewright.estimation.megatron.seconds import Clock
from stagewright.planning.configure.lineup import has_equal_nodes

Ranks = tuple[int, ...]


def groups_differ(cluster: Cluster, layout: Layout) -> bool:
    """Whether equal nodes still give groups of ranks different links: measured ones, ranks in another order than devices, or
    groups that end inside of nodes here and not there."""
    if not has_equal_nodes(cluster):
        return False
    if cluster.measured is not None or isinstance(cluster, ArrangedCluster):
        return True
    node = cluster.nodes[0].devices_per_node
    spans = (layout.tp, layout.tp * layout.cp, layout.tp * layout.ep)
    return any(max(span, node) % min(span, node) for span in spans)


@dataclass(frozen=True)
class GroupsClock(Clock):
    """The clock of `num_ranks` ranks from the first on, which wait for the slowest of their groups.

    `fastest` takes the fastest in its place, for bounds.
    """

    num_ranks: int = 0
    fastest: bool = False

    def groups(self, axis: str) -> tuple[Ranks, ...]:
        """All groups along an axis; of those with the same links the first."""
        first = self.ranks(axis)
        width, stride = len(first), first[1] - first[0] if len(first) > 1 else 1
        found: dict[Ranks, Ranks] = {}
        for offset in range(self.num_ranks):
            if offset // stride % width == 0:
                start = self.first_rank + offset
                ranks = tuple(start + index * stride for index in range(width))
                found.setdefault(self._links_of(ranks), ranks)
        return tuple(found.values())

    def _links_of(self, ranks: Ranks) -> Ranks:
        measured = self.cluster.measured
        if measured is not None and measured.between == "ranks":
            return ranks
        return tuple(self.cluster.node_of(rank) for rank in ranks)

    def collective_seconds(self, collective: Collective) -> float:
        """Alone on the links of the slowest of the groups along its axis."""
        plain = _GroupClock(self.shape, self.layout, self.stack, self.fusion, self.cluster)
        times = (
            replace(plain, first_rank=ranks[0]).collective_seconds(collective)
            for ranks in self.groups(collective.axis)
        )
        return min(times) if self.fastest else max(times)


class _GroupClock(Clock):
    """Of one group, wherever its first rank is."""

    def ranks(self, axis: str) -> Ranks:
        found = super().ranks(axis)
        return tuple(rank + self.first_rank - found[0] for rank in found)
