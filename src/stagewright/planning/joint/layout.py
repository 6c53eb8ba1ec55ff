"""Layouts: the layers of each stage, and its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stagewright.arrays import Ints
from stagewright.compiled import compiled
from stagewright.planning.joint.problem import JointProblem
from stagewright.schedule.list_scheduler.terms import Stages
from stagewright.schedule.placement import Placement
from stagewright.simulation.costs import StageCosts


@dataclass(frozen=True)
class Layout:
    """A layout: stage `s` has the layers ``ends[s - 1]`` to ``ends[s]`` (from 0) and is on rank ``rank_of_stage[s]``.

    `recompute` is the index of the problem's table that each rank uses; empty where all keep everything.

    >>> Layout((2, 3, 5), (0, 1, 0)).sizes
    (2, 1, 2)
    """

    ends: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    recompute: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.ends)

    @property
    def num_layers(self) -> int:
        return self.ends[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers per stage."""
        return tuple(end - start for start, end in zip((0, *self.ends), self.ends, strict=False))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Positions between layers at which the model is cut."""
        return self.ends[:-1]

    @property
    def num_transfers(self) -> int:
        """Number of transfers between ranks of one microbatch's forward.

        >>> Layout((2, 3, 5), (0, 1, 1)).num_transfers
        1
        """
        return sum(before != after for before, after in pairwise(self.rank_of_stage))

    @property
    def placement(self) -> Placement:
        return Placement(self.rank_of_stage)

    @classmethod
    def of_layers(
        cls,
        rank_of_layer: Sequence[int] | Ints,
        cuts: Sequence[int] = (),
        recompute: Sequence[int] | Ints = (),
    ) -> Layout:
        """Return the layout with as few stages as the rank of each layer allows, and further `cuts`.

        >>> Layout.of_layers([0, 0, 1, 0, 0], cuts=[4])
        Layout(ends=(2, 3, 4, 5), rank_of_stage=(0, 1, 0, 0), recompute=())
        """
        ranks = [int(rank) for rank in rank_of_layer]
        wanted = set(cuts)
        starts = [0] + [i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1] or i in wanted]
        placed = tuple(ranks[start] for start in starts)
        return cls((*starts[1:], len(ranks)), placed, tuple(map(int, recompute)) if any(recompute) else ())

    def rank_of_layer(self) -> Ints:
        return np.repeat(np.array(self.rank_of_stage, np.int64), self.sizes)

    def is_cut(self) -> np.ndarray:
        """Return, for each layer, whether a stage starts there."""
        flags = np.zeros(self.num_layers, np.bool_)
        flags[[0, *self.cuts]] = True
        return flags

    def table_of_rank(self, num_ranks: int) -> Ints:
        """Return the index of the problem's table that each rank uses."""
        return np.array(self.recompute or (0,) * num_ranks, np.int64)


def stages_of(problem: JointProblem, layout: Layout) -> Stages:
    """Return the costs of the stages of `layout` on their ranks, for the kernels."""
    tables = layout.table_of_rank(problem.num_ranks)
    return build_stages(layout.rank_of_layer(), layout.is_cut(), tables, problem.costs)


def stage_costs(problem: JointProblem, layout: Layout) -> StageCosts:
    """Return the costs of the stages of `layout` on their ranks, for the simulator."""
    ends = np.array(layout.ends)
    starts = np.array((0, *layout.cuts))
    placed = list(layout.rank_of_stage)
    table = layout.table_of_rank(problem.num_ranks)[placed]
    columns = problem.sums[table, :, ends] - problem.sums[table, :, starts]
    forward, input_grad, weight_grad, base, saved, held = columns.T
    speed = problem.speed[placed]
    crosses = np.array([before != after for before, after in pairwise(placed)], bool)
    received = np.concatenate([[0.0], problem.moves[1, starts[1:]] * crosses, [0.0]])
    return StageCosts.of(
        forward / speed + received[:-1],
        input_grad / speed + received[1:],
        weight_grad / speed,
        saved_bytes=saved,
        held_bytes=held,
        base_bytes=base,
    )


def transfer_times(problem: JointProblem, layout: Layout) -> dict[tuple[int, int], float]:
    """Return the seconds of the transfer between each stage and the next, for the simulator."""
    return {(stage, stage + 1): float(problem.transfer_s[cut]) for stage, cut in enumerate(layout.cuts)}


@compiled
def build_stages(rank_of_layer, is_cut, table_of_rank, costs):
    """Return the `Stages` of layers on ranks; a stage ends where the rank changes or before a layer that `is_cut`."""
    num_layers, num_ranks, moves = len(rank_of_layer), len(costs.speed), costs.moves
    starts = np.empty(num_layers + 1, np.int64)
    num_stages = 0
    for layer in range(num_layers):
        if layer == 0 or is_cut[layer] or rank_of_layer[layer] != rank_of_layer[layer - 1]:
            starts[num_stages] = layer
            num_stages += 1
    starts[num_stages] = num_layers
    rank = np.empty(num_stages, np.int64)
    columns = np.empty((6, num_stages))
    transfer = np.zeros(num_stages)
    limit = costs.memory_bytes.copy()
    counts = np.zeros(num_ranks + 1, np.int64)
    for stage in range(num_stages):
        rank[stage] = rank_of_layer[starts[stage]]
        table_sums = costs.sums[table_of_rank[rank[stage]]]
        for row in range(6):
            columns[row, stage] = table_sums[row, starts[stage + 1]] - table_sums[row, starts[stage]]
        if stage > 0 and rank[stage] != rank[stage - 1]:
            transfer[stage] = moves[0, starts[stage]]
        limit[rank[stage]] -= columns[3, stage]
        counts[rank[stage] + 1] += 1
        for row in range(3):
            columns[row, stage] = columns[row, stage] / costs.speed[rank[stage]] + costs.overhead_s
    for stage in range(1, num_stages):
        if rank[stage] != rank[stage - 1]:
            columns[0, stage] += moves[1, starts[stage]]
            columns[1, stage - 1] += moves[1, starts[stage]]
    offsets = np.cumsum(counts)
    members = np.empty(num_stages, np.int64)
    place = offsets[:-1].copy()
    headroom = np.zeros(num_stages)
    later = np.zeros(num_ranks)
    for stage in range(num_stages):
        members[place[rank[stage]]] = stage
        place[rank[stage]] += 1
    for stage in range(num_stages - 1, -1, -1):
        headroom[stage] = later[rank[stage]]
        later[rank[stage]] += columns[4, stage]
    return Stages(
        starts[:num_stages].copy(),
        rank,
        columns[0],
        columns[1],
        columns[2],
        transfer,
        columns[4],
        columns[5],
        headroom,
        limit,
        members,
        offsets,
    )
