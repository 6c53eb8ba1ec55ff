"""The exact dynamic program over all cuts: what the other searches are measured against."""

from __future__ import annotations

import math

from stagewright.planning.partition.bisection import TimedCuts
from stagewright.planning.partition.stage_ranges import StageRanges


def exact(leaves: StageRanges) -> TimedCuts | None:
    """The partition of least bottleneck by a program over (stage, end), or None if none fits.

    Evaluates every stage over every range that leaves enough positions to the others.
    """
    ends = [*map(int, leaves.ranges.legal), leaves.ranges.size]
    count, last = leaves.num_stages, len(ends) - 1
    best = {-1: (0.0, ())}
    for stage in range(count):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        final = stage == count - 1
        for start, (so_far, cuts) in best.items():
            begin = ends[start] if start >= 0 else 0
            for index in range(start + 1, last + 1) if not final else [last]:
                if last - index < count - 1 - stage or index <= start:
                    continue
                cost = max(so_far, leaves.cost(stage, begin, ends[index]))
                if not final:
                    cost = max(cost, leaves.transfer_seconds(stage, ends[index]))
                if math.isfinite(cost) and (index not in following or cost < following[index][0]):
                    following[index] = (cost, (*cuts, ends[index]))
        best = following
    if last not in best:
        return None
    seconds, cuts = best[last]
    return TimedCuts(cuts[:-1], seconds)
