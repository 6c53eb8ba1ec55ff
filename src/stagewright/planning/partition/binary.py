"""Binary partitioning: halve the stages, cut the model as the theorem says, and continue with each half.

The theorem, for two neighbouring stages that divide the range ``[start, stop)``: let E = T + O be the time of a stage, T its
computation and O the least time it adds to fit its memory. If T and O never decrease when operators are added, and of two
stages the one that demands more memory has the larger overhead, then a cut of least max(E) lies between the cut at which the
times are equal and the cut at which the demands are. If the last assumption fails, it still lies between the cuts at which
the times and the overheads are equal.

Source: the abstract of DawnPiper (arXiv 2505.05856) names binary pipeline partitioning with such a theorem; statement and
proof here are a reconstruction (`docs/design/0008-memory.md`). Where the original scans the candidates of an interval, the
crossing of the two halves' times is bisected here, because the best time of a half never decreases with more operators.
"""

from __future__ import annotations

import math

import numpy as np

from stagewright.arrays import Ints
from stagewright.planning.partition.bisection import TimedCuts, bottleneck, last_true
from stagewright.planning.partition.stage_ranges import StageRanges


def binary(stage_ranges: StageRanges) -> TimedCuts | None:
    """Return the partition found by halving, or None if none fits.

    The crossing is searched between the compute-balanced and the memory-balanced cut first, and outward from there while the
    same half is the larger one: so an interval without a feasible cut does not mean that there is none.
    """
    search = _Halving(stage_ranges)
    cuts = search.solve(0, stage_ranges.ranges.size, 0, stage_ranges.num_stages)[1]
    if cuts is None:
        return None
    return TimedCuts(cuts, bottleneck(stage_ranges, cuts))


Solved = tuple[float, tuple[int, ...] | None]


class _Halving:
    def __init__(self, stage_ranges: StageRanges) -> None:
        self.stage_ranges = stage_ranges
        self.ends: Ints = stage_ranges.ranges.legal
        self.solved: dict[tuple[int, int, int, int], Solved] = {}

    def solve(self, start: int, stop: int, first: int, end: int) -> Solved:
        """Return the least bottleneck of the stages from `first` up to `end` over ``[start, stop)``, and their cuts;
        infinite and None if they do not fit."""
        key = (start, stop, first, end)
        if key not in self.solved:
            self.solved[key] = self._solved(*key)
        return self.solved[key]

    def _solved(self, start: int, stop: int, first: int, end: int) -> Solved:
        if end - first == 1:
            cost = self.stage_ranges.cost(first, start, stop)
            return cost, () if math.isfinite(cost) else None
        middle = (first + end) // 2
        low = int(np.searchsorted(self.ends, start, side="right")) + middle - first - 1
        high = int(np.searchsorted(self.ends, stop, side="left")) - (end - middle)
        if low > high:
            return math.inf, None
        halves = _Halves(self, start, stop, first, middle, end)
        return halves.best(low, high)


class _Halves:
    """The cut between two groups of stages."""

    def __init__(self, search: _Halving, start: int, stop: int, first: int, middle: int, end: int) -> None:
        self.search = search
        self.start, self.stop = start, stop
        self.groups = (first, middle), (middle, end)

    def left(self, index: int) -> Solved:
        return self.search.solve(self.start, int(self.search.ends[index]), *self.groups[0])

    def right(self, index: int) -> Solved:
        return self.search.solve(int(self.search.ends[index]), self.stop, *self.groups[1])

    def best(self, low: int, high: int) -> Solved:
        crossing = self._crossing(low, high)
        best: Solved = (math.inf, None)
        for index in (crossing, crossing + 1):
            if low <= index <= high:
                best = min(best, self._at(index), key=lambda solved: solved[0])
        return self._around(best, crossing, low, high)

    def _crossing(self, low: int, high: int) -> int:
        """Return the last cut at which the left half is no slower, searched first inside the interval, then outward."""
        stage_ranges, ends = self.search.stage_ranges, self.search.ends
        sides = (stage_ranges, ends, low, high, self.start, self.stop, *self.groups)
        inner, outer = sorted((time_balance(*sides), memory_balance(*sides)))
        step = 1
        while inner > low and not self._is_left_faster(inner):
            inner, outer, step = max(low, inner - step), inner, 2 * step
        step = 1
        while outer < high and self._is_left_faster(outer):
            inner, outer, step = outer, min(high, outer + step), 2 * step
        return last_true(self._is_left_faster, inner, outer)

    def _is_left_faster(self, index: int) -> bool:
        """Return whether the left half is no slower; False where neither half fits."""
        left_s, right_s = self.left(index)[0], self.right(index)[0]
        if math.isinf(left_s) and math.isinf(right_s):
            return False
        return left_s <= right_s

    def _at(self, index: int) -> Solved:
        left_s, left_cuts = self.left(index)
        right_s, right_cuts = self.right(index)
        if left_cuts is None or right_cuts is None:
            return math.inf, None
        cut = int(self.search.ends[index])
        transfer = self.search.stage_ranges.transfer_seconds(self.groups[0][1] - 1, cut)
        return max(left_s, right_s, transfer), (*left_cuts, cut, *right_cuts)

    def _around(self, best: Solved, crossing: int, low: int, high: int) -> Solved:
        """Return the best of `best` and the cuts near the crossing, whose boundaries may be smaller, as far as one half
        alone does not rule them out."""
        slowest = max(self.left(crossing)[0], self.right(crossing)[0])
        if best[0] <= slowest:
            return best
        for index in range(crossing - 1, low - 1, -1):
            if self.right(index)[0] >= best[0]:
                break
            best = min(best, self._at(index), key=lambda solved: solved[0])
        for index in range(crossing + 2, high + 1):
            if self.left(index)[0] >= best[0]:
                break
            best = min(best, self._at(index), key=lambda solved: solved[0])
        return best


Group = tuple[int, int]
"""The first stage of a group, and the one after its last."""


def time_balance(
    stage_ranges: StageRanges, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """Return the index into `ends`, from `low` to `high`, of the last cut at which the left group is no slower."""
    left_speed, right_speed = _speed(stage_ranges, x), _speed(stage_ranges, y)
    seconds = stage_ranges.ranges.seconds

    def is_left_faster(index: int) -> bool:
        cut = int(ends[index])
        return (
            float(seconds[cut] - seconds[start]) / left_speed
            <= float(seconds[stop] - seconds[cut]) / right_speed
        )

    return last_true(is_left_faster, low, high)


def memory_balance(
    stage_ranges: StageRanges, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """Return the index into `ends`, from `low` to `high`, of the last cut at which the mean rank of the left group is over
    its capacity by no more bytes than that of the right group."""

    def is_left_emptier(index: int) -> bool:
        cut = int(ends[index])
        return stage_ranges.mean_excess(*x, start, cut) <= stage_ranges.mean_excess(*y, cut, stop)

    return last_true(is_left_emptier, low, high)


def _speed(stage_ranges: StageRanges, group: Group) -> float:
    return sum(1 / stage_ranges.terms[stage].inverse_speed for stage in range(*group))
