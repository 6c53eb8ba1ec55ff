"""Small moves of the cuts of a partition, where costs are not monotone: a longer stage hides more offloading."""

from __future__ import annotations

import itertools
import math

import numpy as np

from stagewright.planning.partition.binary import binary
from stagewright.planning.partition.bisection import TimedCuts, bisect, bottleneck
from stagewright.planning.partition.stage_ranges import StageRanges

_STEPS = (1, -1, 2, -2, 4, -4, 8, -8)
_ROUNDS = 20


def best_partition(stage_ranges: StageRanges) -> TimedCuts | None:
    """Return the partition of bisection or, where stages offload and bisection is not exact, the better of it and halving,
    with cuts moved as long as that makes the slowest stage faster; None if nothing fits."""
    partition = bisect(stage_ranges)
    if partition is None:  # then no partition fits
        return None
    offloads = any(math.isfinite(terms.link_s_per_byte) for terms in stage_ranges.terms)
    halved = binary(stage_ranges) if offloads else None
    return refined(
        stage_ranges, halved if halved is not None and halved.seconds < partition.seconds else partition
    )


def refined(stage_ranges: StageRanges, partition: TimedCuts) -> TimedCuts:
    """Return `partition` with single cuts, or two neighbouring ones together, moved by a few positions."""
    legal = stage_ranges.ranges.legal
    for _ in range(_ROUNDS):
        better = _moved(stage_ranges, partition, [int(np.searchsorted(legal, cut)) for cut in partition.cuts])
        if better is None:
            break
        partition = better
    return partition


def narrowed(stage_ranges: StageRanges, partition: TimedCuts, slack: float) -> TimedCuts:
    """Return `partition` with every cut moved to the smallest boundary at which both its stages take at most ``1 + slack``
    times the bottleneck."""
    limit = partition.seconds * (1 + slack)
    legal = stage_ranges.ranges.legal
    cuts = list(partition.cuts)
    for index, cut in enumerate(cuts):
        start = cuts[index - 1] if index else 0
        stop = cuts[index + 1] if index + 1 < len(cuts) else stage_ranges.ranges.size
        place = int(np.searchsorted(legal, cut))

        def fits(at: int, index: int = index, start: int = start, stop: int = stop) -> bool:
            middle = int(legal[at])
            return (
                start < middle < stop
                and max(stage_ranges.cost(index, start, middle), stage_ranges.cost(index + 1, middle, stop))
                <= limit
            )

        low = high = place
        while low > 0 and fits(low - 1):
            low -= 1
        while high + 1 < len(legal) and fits(high + 1):
            high += 1
        around = legal[low : high + 1]
        cuts[index] = int(around[np.argmin(stage_ranges.ranges.boundary_bytes[around])])
    return TimedCuts(tuple(cuts), bottleneck(stage_ranges, tuple(cuts)))


def _moved(stage_ranges: StageRanges, partition: TimedCuts, places: list[int]) -> TimedCuts | None:
    """Return the partition after the first move that helps, of the cuts next to the slowest stage, or None."""
    legal = stage_ranges.ranges.legal
    slowest = _slowest(stage_ranges, partition.cuts)
    for cut in {slowest - 1, slowest} & set(range(len(places))):
        for step in _STEPS:
            for moved in ({cut}, {cut - 1, cut}, {cut, cut + 1}):
                tried = [place + step * (index in moved) for index, place in enumerate(places)]
                if not _in_order(tried, len(legal)):
                    continue
                cuts = tuple(int(legal[place]) for place in tried)
                seconds = bottleneck(stage_ranges, cuts)
                if seconds < partition.seconds * (1 - 1e-9):
                    return TimedCuts(cuts, seconds)
    return None


def _slowest(stage_ranges: StageRanges, cuts: tuple[int, ...]) -> int:
    ends = (0, *cuts, stage_ranges.ranges.size)
    costs = [
        stage_ranges.cost(stage, ends[stage], ends[stage + 1]) for stage in range(stage_ranges.num_stages)
    ]
    return costs.index(max(costs))


def _in_order(places: list[int], count: int) -> bool:
    bounds = [-1, *places, count]
    return all(a < b for a, b in itertools.pairwise(bounds))
