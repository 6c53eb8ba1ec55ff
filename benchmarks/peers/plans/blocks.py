"""Partitions at the ends of blocks: where far less crosses than around, as between a transformer's residual additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stagewright.arrays import Ints
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.checkpointing.chain import narrow_places
from stagewright.planning.partition.bisection import bisect
from stagewright.planning.partition.ranges import Ranges
from stagewright.planning.partition.stage_ranges import StageRanges, StageTerms

_WINDOWS = (12, 6, 3)
"""Operators to either side among which the end of a block is narrowest; narrower windows until there are enough blocks."""

_MOST_MOVES = 200


def block_ends(model_costs: RangeCosts, num_stages: int) -> Ints:
    """Legal cuts between blocks, at least ``num_stages - 1`` of them.

    Raises:
        PlanError: the model has fewer blocks.
    """
    for window in _WINDOWS:
        ends = np.intersect1d(narrow_places(model_costs.cuts.value_bytes, window), model_costs.legal_cuts)
        if len(ends) >= num_stages - 1:
            return ends
    raise PlanError(
        f"model '{model_costs.graph.name}' has too few blocks for {num_stages} stages: use fewer stages"
    )


def even_cuts(model_costs: RangeCosts, num_stages: int) -> tuple[int, ...]:
    """As many blocks for every stage, or one more."""
    ends = block_ends(model_costs, num_stages)
    shares = np.arange(1, num_stages) * (len(ends) + 1) / num_stages
    return tuple(int(end) for end in ends[np.round(shares).astype(int) - 1])


def timed_cuts(model_costs: RangeCosts, ranges: Ranges, num_stages: int) -> tuple[int, ...]:
    """The blocks whose slowest stage is fastest, whatever they take."""
    legal = block_ends(model_costs, num_stages)
    unlimited = [StageTerms(copies=1, capacity=float("inf"))] * num_stages
    found = bisect(StageRanges(_cut_at(ranges, legal), unlimited))
    assert found is not None, "without a limit there is a partition"
    return found.cuts


def moved_cuts(
    ends: Ints, cuts: Sequence[int], cost: Callable[[Sequence[int]], tuple[float, ...]]
) -> tuple[int, ...]:
    """`cuts` with blocks handed to neighbouring stages, one at a time, as long as that lowers `cost`."""
    places = [int(np.searchsorted(ends, cut)) for cut in cuts]
    best = cost(cuts)
    for _ in range(_MOST_MOVES):
        tried = [
            (cost([int(ends[place]) for place in other]), other)
            for index in range(len(places))
            for step in (-1, 1)
            if _in_order(other := [p + step * (i == index) for i, p in enumerate(places)], len(ends))
        ]
        found = min(tried, default=(best, places))
        if found[0] >= best:
            break
        best, places = found
    return tuple(int(ends[place]) for place in places)


def at_blocks(model_costs: RangeCosts, ranges: Ranges, num_stages: int) -> Ranges:
    """`ranges` that may be cut between blocks only."""
    return _cut_at(ranges, block_ends(model_costs, num_stages))


def _cut_at(ranges: Ranges, legal: Ints) -> Ranges:
    return replace(ranges, legal=legal)


def _in_order(places: Sequence[int], count: int) -> bool:
    return all(a < b for a, b in zip((-1, *places), (*places, count), strict=True))
