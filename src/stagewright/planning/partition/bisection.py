"""Bisection on the bottleneck: the least time within which stages, each as long as it may be, cover the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Ints
from stagewright.planning.partition.leaves import Leaves

_CLOSE = 1e-4
"""Bottlenecks that differ by less than this part are equal."""


@dataclass(frozen=True)
class Found:
    """A partition and the time of its slowest stage or boundary."""

    cuts: tuple[int, ...]
    seconds: float


def last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last of ``low..high`` for which `holds`, if it holds for all before; `low`, for which it is never called, if it
    holds for none of the others.

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


def bottleneck(leaves: Leaves, cuts: tuple[int, ...]) -> float:
    """Seconds of the slowest stage, or of the slowest transfer between two of them; infinite if a stage does not fit."""
    ends = (0, *cuts, leaves.ranges.size)
    slowest = max(leaves.cost(stage, ends[stage], ends[stage + 1]) for stage in range(leaves.num_stages))
    transfers = (leaves.transfer_seconds(stage, cut) for stage, cut in enumerate(cuts))
    return max(slowest, *transfers) if cuts else slowest


def bisect(leaves: Leaves) -> Found | None:
    """The partition of least bottleneck, or None if none fits.

    Exact, to a ten-thousandth, where costs are non-decreasing in the range: then a stage that goes farther leaves its
    successors no worse off. Whether a stage fits at all always is, so that None means that nothing fits.
    """
    return _Bisection(leaves).found()


_MOST_BACK = 8
"""How many positions a stage is tried to take over from the one before."""


class _Bisection:
    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        ranges = leaves.ranges
        self.ends: Ints = np.concatenate([ranges.legal, [ranges.size]]).astype(np.int64)
        self.width = ranges.boundary_bytes[self.ends]
        self.best: Found | None = None
        self.low_ends = [0] * leaves.num_stages
        self.high_ends = [len(self.ends) - 1] * leaves.num_stages

    def found(self) -> Found | None:
        if len(self.ends) < self.leaves.num_stages:
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
        """The time shared out evenly over ranks of unequal speed; and twice that, which often suffices."""
        speeds = sum(1 / terms.slowness for terms in self.leaves.terms)
        least = float(self.leaves.ranges.seconds[-1]) / speeds
        return least, 2 * least

    def _try(self, limit: float) -> bool:
        """Whether stages of at most `limit` seconds cover the model; narrows where each may end."""
        reached = self._reach(limit)
        if reached is None:
            return False
        cuts = tuple(int(self.ends[index]) for index in reached[:-1])
        seconds = bottleneck(self.leaves, cuts)
        if self.best is None or seconds < self.best.seconds:
            self.best = Found(cuts, seconds)
            self.high_ends = reached
        return True

    def _reach(self, limit: float) -> list[int] | None:
        """Where each stage ends, as an index into `ends`, if each goes as far as it may."""
        start, before = 0, -1
        reached: list[int] = []
        for stage in range(self.leaves.num_stages):
            left = self.leaves.num_stages - 1 - stage
            index = self._farthest(stage, start, before, limit, len(self.ends) - 1 - left)
            if index is None and left:
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
        """Ends with which `stage`, which cannot take what comes next, leaves that to its successor and takes over from its
        predecessors, so that none is empty; None if they have nothing it can take."""
        for back in range(1, _MOST_BACK if reached else 0):
            ends = [*reached, reached[-1]]
            ends[stage - 1] -= back
            for earlier in range(stage - 2, -1, -1):
                ends[earlier] = min(ends[earlier], ends[earlier + 1] - 1)
            if ends[0] < 0:
                return None
            if all(self._takes(one, ends, limit) for one in range(stage + 1)):
                return ends
        return None

    def _takes(self, stage: int, ends: list[int], limit: float) -> bool:
        start = int(self.ends[ends[stage - 1]]) if stage else 0
        stop = int(self.ends[ends[stage]])
        cost = max(self.leaves.cost(stage, start, stop), self.leaves.transfer_seconds(stage, stop))
        return cost <= limit and math.isfinite(cost)

    def _learn(self, reached: list[int]) -> None:
        """No partition that is good enough lets a stage end before where it ended in vain."""
        for stage, index in enumerate(reached):
            self.low_ends[stage] = max(self.low_ends[stage], index)

    def _farthest(self, stage: int, start: int, before: int, limit: float, last: int) -> int | None:
        """The last end in reach: by bisection between the ends known from other limits."""
        is_last = stage == self.leaves.num_stages - 1
        if is_last:
            whole = self.leaves.cost(stage, start, self.leaves.ranges.size)
            return len(self.ends) - 1 if whole <= limit and math.isfinite(whole) else None
        lowest = max(before + 1, self.low_ends[stage])
        highest = min(last, self._by_time(stage, start, limit))
        if math.isfinite(limit) and self.best is not None:
            highest = min(highest, self.high_ends[stage])
        if lowest > highest:
            lowest = before + 1

        def is_within(index: int) -> bool:
            cost = self.leaves.cost(stage, start, int(self.ends[index]))
            return cost <= limit and math.isfinite(cost)

        index = last_true(is_within, lowest - 1, highest)
        if index < lowest:
            index = before
            if self.low_ends[stage] > before + 1:
                index = last_true(is_within, before, min(last, self.low_ends[stage] - 1))
        return self._narrow_enough(stage, index, before, limit)

    def _by_time(self, stage: int, start: int, limit: float) -> int:
        """The last end that computation alone allows."""
        seconds = self.leaves.ranges.seconds
        reach = float(seconds[start]) + limit / self.leaves.terms[stage].slowness
        farthest = int(np.searchsorted(seconds, reach * (1 + 1e-12), side="right")) - 1
        return int(np.searchsorted(self.ends, farthest, side="right")) - 1

    def _narrow_enough(self, stage: int, index: int, before: int, limit: float) -> int | None:
        """The last end after `before` and not after `index` whose transfer is within `limit`."""
        while index > before:
            if self.leaves.transfer_seconds(stage, int(self.ends[index])) <= limit:
                return index
            index -= 1
        return None
