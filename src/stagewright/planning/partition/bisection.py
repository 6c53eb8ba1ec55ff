"""Partitioning by bisection on the bottleneck: the least time within which greedily filled stages cover the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Ints
from stagewright.planning.partition.stage_ranges import StageRanges

_CLOSE = 1e-4
"""Relative difference by which equal bottlenecks may differ."""


@dataclass(frozen=True)
class TimedCuts:
    """A partition and the time of its slowest stage or boundary."""

    cuts: tuple[int, ...]
    seconds: float


def last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last of ``low..high`` for which `holds`, if it holds for all before; `low`, for which it is never called,
    if it holds for none of the others.

    >>> last_true(lambda index: index < 5, 0, 9), last_true(lambda index: False, 2, 9)
    (4, 2)
    """
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def bottleneck(stage_ranges: StageRanges, cuts: tuple[int, ...]) -> float:
    """Return the seconds of the slowest stage or transfer between stages; infinite if a stage does not fit."""
    ends = (0, *cuts, stage_ranges.ranges.size)
    slowest = max(
        stage_ranges.cost(stage, ends[stage], ends[stage + 1]) for stage in range(stage_ranges.num_stages)
    )
    transfers = (stage_ranges.transfer_seconds(stage, cut) for stage, cut in enumerate(cuts))
    return max(slowest, *transfers) if cuts else slowest


def bisect(stage_ranges: StageRanges) -> TimedCuts | None:
    """Return the partition of least bottleneck, or None if none fits.

    It is exact, to a ten-thousandth, where costs never decrease when operators are added: then a stage that goes farther
    leaves its successors no worse off. Memory never decreases, so None means that nothing fits.
    """
    return _Bisection(stage_ranges).solve()


_MOST_BACK = 8
"""Maximum number of positions that a stage takes over from the one before."""


class _Bisection:
    def __init__(self, stage_ranges: StageRanges) -> None:
        self.stage_ranges = stage_ranges
        ranges = stage_ranges.ranges
        self.ends: Ints = np.concatenate([ranges.legal, [ranges.size]]).astype(np.int64)
        self.width = ranges.boundary_bytes[self.ends]
        self.best: TimedCuts | None = None
        self.low_ends = [0] * stage_ranges.num_stages
        self.high_ends = [len(self.ends) - 1] * stage_ranges.num_stages

    def solve(self) -> TimedCuts | None:
        if len(self.ends) < self.stage_ranges.num_stages:
            return None
        low, high = self._bounds()
        if not self._try(high) and not self._try(math.inf):
            return None
        while self.best is not None:
            high = self.best.seconds
            if high - low <= _CLOSE * high or not math.isfinite(high):
                break
            middle = (low + high) / 2
            if not self._try(middle):
                low = middle
        return self.best

    def _bounds(self) -> tuple[float, float]:
        """Return the time divided evenly over ranks of unequal speed, and twice that, which often suffices."""
        speeds = sum(1 / terms.inverse_speed for terms in self.stage_ranges.terms)
        least = float(self.stage_ranges.ranges.seconds[-1]) / speeds
        return least, 2 * least

    def _try(self, limit: float) -> bool:
        """Return whether stages of at most `limit` seconds cover the model; narrows the ends of each stage."""
        reached = self._reach(limit)
        if reached is None:
            return False
        cuts = tuple(int(self.ends[index]) for index in reached[:-1])
        seconds = bottleneck(self.stage_ranges, cuts)
        if self.best is None or seconds < self.best.seconds:
            self.best = TimedCuts(cuts, seconds)
            self.high_ends = reached
        return True

    def _reach(self, limit: float) -> list[int] | None:
        """Return the end of each stage, as an index into `ends`, if each goes as far as it may."""
        start, before = 0, -1
        reached: list[int] = []
        for stage in range(self.stage_ranges.num_stages):
            num_later = self.stage_ranges.num_stages - 1 - stage
            index = self._farthest(stage, start, before, limit, len(self.ends) - 1 - num_later)
            if index is None and num_later:
                reached = self._with_one_more(stage, reached, limit) or reached
                index = reached.pop() if len(reached) > stage else None
            if index is None:
                self._learn(reached)
                return None
            reached.append(index)
            start, before = int(self.ends[index]), index
        if reached[-1] != len(self.ends) - 1:
            self._learn(reached)
            return None
        return reached

    def _with_one_more(self, stage: int, reached: list[int], limit: float) -> list[int] | None:
        """Return ends with which `stage`, which cannot hold what comes next, leaves that to its successor and takes over
        from its predecessors, so that none is empty; None if they have nothing it can hold."""
        for back in range(1, _MOST_BACK if reached else 0):
            ends = [*reached, reached[-1]]
            ends[stage - 1] -= back
            for earlier in range(stage - 2, -1, -1):
                ends[earlier] = min(ends[earlier], ends[earlier + 1] - 1)
            if ends[0] < 0:
                return None
            if all(self._takes(index, ends, limit) for index in range(stage + 1)):
                return ends
        return None

    def _takes(self, stage: int, ends: list[int], limit: float) -> bool:
        start = int(self.ends[ends[stage - 1]]) if stage else 0
        stop = int(self.ends[ends[stage]])
        cost = max(
            self.stage_ranges.cost(stage, start, stop), self.stage_ranges.transfer_seconds(stage, stop)
        )
        return cost <= limit and math.isfinite(cost)

    def _learn(self, reached: list[int]) -> None:
        """Record that in a good enough partition no stage ends before where it ended in a failed attempt."""
        for stage, index in enumerate(reached):
            self.low_ends[stage] = max(self.low_ends[stage], index)

    def _farthest(self, stage: int, start: int, before: int, limit: float, last: int) -> int | None:
        """Return the last end in reach, by bisection between the ends known from other limits."""
        is_last = stage == self.stage_ranges.num_stages - 1
        if is_last:
            whole = self.stage_ranges.cost(stage, start, self.stage_ranges.ranges.size)
            return len(self.ends) - 1 if whole <= limit and math.isfinite(whole) else None
        lowest = max(before + 1, self.low_ends[stage])
        highest = min(last, self._by_time(stage, start, limit))
        if math.isfinite(limit) and self.best is not None:
            highest = min(highest, self.high_ends[stage])
        if lowest > highest:
            lowest = before + 1

        def is_within(index: int) -> bool:
            cost = self.stage_ranges.cost(stage, start, int(self.ends[index]))
            return cost <= limit and math.isfinite(cost)

        index = last_true(is_within, lowest - 1, highest)
        if index < lowest:
            index = before
            if self.low_ends[stage] > before + 1:
                index = last_true(is_within, before, min(last, self.low_ends[stage] - 1))
        return self._narrow_enough(stage, index, before, limit)

    def _by_time(self, stage: int, start: int, limit: float) -> int:
        """Return the last end that the compute time allows."""
        seconds = self.stage_ranges.ranges.seconds
        reach = float(seconds[start]) + limit / self.stage_ranges.terms[stage].inverse_speed
        farthest = int(np.searchsorted(seconds, reach * (1 + 1e-12), side="right")) - 1
        return int(np.searchsorted(self.ends, farthest, side="right")) - 1

    def _narrow_enough(self, stage: int, index: int, before: int, limit: float) -> int | None:
        """Return the last end after `before` and not after `index` whose transfer is within `limit`."""
        while index > before:
            if self.stage_ranges.transfer_seconds(stage, int(self.ends[index])) <= limit:
                return index
            index -= 1
        return None
