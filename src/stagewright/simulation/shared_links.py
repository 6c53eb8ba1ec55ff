"""Links that several ranks share, such as the network adapters of a node, and which transfer uses which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.errors import InputError
from stagewright.simulation.engine import Ints
from stagewright.simulation.structure import Structure

NO_LINK = -1


@dataclass(frozen=True)
class SharedLinks:
    """The link on which each rank sends to other nodes and the one on which it receives, as numbers from 0.

    A transfer between nodes occupies both, one within a node neither (only the way between its two ranks).
    Every link carries one transfer at a time, in the order in which they were asked for: a link of a given
    bandwidth is done with all of them as soon as if it had carried them together.
    Ignores: that transfers carried together would each arrive later, but not one after the other.
    """

    node_of_rank: tuple[int, ...]
    sends_on: tuple[int, ...]
    receives_on: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = len(self.node_of_rank), len(self.sends_on), len(self.receives_on)
        if len(set(sizes)) != 1 or min(*self.sends_on, *self.receives_on, 0) < 0:
            raise InputError(
                f"shared links of {sizes} ranks: name for each rank its node and the links it sends and receives on"
            )

    @classmethod
    def of_nodes(cls, num_ranks: int, ranks_per_node: int, adapters_per_node: int = 1) -> SharedLinks:
        """Ranks in order on nodes of equal size, whose ranks share the node's adapters evenly.

        Every adapter carries one transfer out and one in at a time.

        >>> SharedLinks.of_nodes(4, 2).sends_on, SharedLinks.of_nodes(4, 2, adapters_per_node=2).sends_on
        ((0, 0, 1, 1), (0, 1, 2, 3))
        """
        ranks = range(num_ranks)
        nodes = tuple(rank // ranks_per_node for rank in ranks)
        adapters = tuple(
            node * adapters_per_node + rank % ranks_per_node * adapters_per_node // ranks_per_node
            for rank, node in zip(ranks, nodes, strict=True)
        )
        first_in = max(adapters) + 1
        return cls(nodes, adapters, tuple(first_in + adapter for adapter in adapters))

    def of_slots(self, structure: Structure) -> tuple[Ints, Ints, int]:
        """For every slot the two links its transfer occupies (or `NO_LINK`), and how many links there are.

        Raises:
            InputError: a program of more ranks than there are links for.
        """
        rank_of_stage = structure.rules.rank_of_stage
        if max(rank_of_stage) >= len(self.node_of_rank):
            raise InputError(
                f"shared links of {len(self.node_of_rank)} ranks for a program of {max(rank_of_stage) + 1}"
            )
        first = np.full(len(structure.tables.slot_link), NO_LINK)
        second = first.copy()
        num_links = max(*self.sends_on, *self.receives_on) + 1
        own: dict[tuple[int, int], int] = {}
        for slot, source_stage, target_stage in structure.journeys:
            source, target = rank_of_stage[source_stage], rank_of_stage[target_stage]
            if self.node_of_rank[source] != self.node_of_rank[target]:
                first[slot], second[slot] = self.sends_on[source], self.receives_on[target]
            else:
                first[slot] = own.setdefault((source, target), num_links + len(own))
        return first, second, num_links + len(own)
