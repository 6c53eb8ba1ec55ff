"""Binary partitioning: cut the stages in half, the model where the theorem says, and each half likewise.

The theorem, for two neighbouring stages that share the range ``[start, stop)``: let E = T + O be the time of a stage, T its
computation and O the least time it adds to fit its memory. If T and O never fall when operators are added, and of two stages
the one that demands more memory has the larger overhead, then a cut of least max(E) lies between the cut at which the
times are equal and the cut at which the demands are. If the last assumption fails, it still lies between the cuts at which
the times and the overheads are equal.

Source: the abstract of DawnPiper (arXiv 2505.05856) names binary pipeline partitioning with such a theorem; statement and
proof here are a reconstruction (`docs/design/0008-memory.md`). Where the original scans the candidates of an interval, the
crossing of the two halves' times is bisected here, because the best time of a half never falls when it gets more operators.
"""

from __future__ import annotations

import math

import numpy as np

from stagewright.arrays import Ints
from stagewright.planning.partition.bisection import Found, bottleneck, last_true
from stagewright.planning.partition.leaves import Leaves


def binary(leaves: Leaves) -> Found | None:
    """The partition found by halving, or None if none fits.

    The crossing is looked for between the compute-balanced and the memory-balanced cut first, and outward from there while
    the larger half is still the same: so an interval without a feasible cut never means that there is none.
    """
    search = _Halving(leaves)
    cuts = search.solve(0, leaves.ranges.size, 0, leaves.num_stages)[1]
    if cuts is None:
        return None
    return Found(cuts, bottleneck(leaves, cuts))


Solved = tuple[float, tuple[int, ...] | None]


class _Halving:
    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self.ends: Ints = leaves.ranges.legal
        self.known: dict[tuple[int, int, int, int], Solved] = {}

    def solve(self, start: int, stop: int, first: int, behind: int) -> Solved:
        """Least bottleneck of stages ``first..behind`` over ``[start, stop)`` and their cuts; infinite without."""
        key = (start, stop, first, behind)
        if key not in self.known:
            self.known[key] = self._solved(*key)
        return self.known[key]

    def _solved(self, start: int, stop: int, first: int, behind: int) -> Solved:
        if behind - first == 1:
            cost = self.leaves.cost(first, start, stop)
            return cost, () if math.isfinite(cost) else None
        middle = (first + behind) // 2
        low = int(np.searchsorted(self.ends, start, side="right")) + middle - first - 1
        high = int(np.searchsorted(self.ends, stop, side="left")) - (behind - middle)
        if low > high:
            return math.inf, None
        halves = _Halves(self, start, stop, first, middle, behind)
        return halves.best(low, high)


class _Halves:
    """One cut between two groups of stages."""

    def __init__(self, search: _Halving, start: int, stop: int, first: int, middle: int, behind: int) -> None:
        self.search = search
        self.start, self.stop = start, stop
        self.groups = (first, middle), (middle, behind)

    def left(self, index: int) -> Solved:
        return self.search.solve(self.start, int(self.search.ends[index]), *self.groups[0])

    def right(self, index: int) -> Solved:
        return self.search.solve(int(self.search.ends[index]), self.stop, *self.groups[1])

    def best(self, low: int, high: int) -> Solved:
        crossing = self._crossing(low, high)
        found: Solved = (math.inf, None)
        for index in (crossing, crossing + 1):
            if low <= index <= high:
                found = min(found, self._at(index), key=lambda solved: solved[0])
        return self._around(found, crossing, low, high)

    def _crossing(self, low: int, high: int) -> int:
        """The last cut at which the left half is no slower: first inside the interval, then outward."""
        leaves, ends = self.search.leaves, self.search.ends
        sides = (leaves, ends, low, high, self.start, self.stop, *self.groups)
        inner, outer = sorted((time_balance(*sides), memory_balance(*sides)))
        step = 1
        while inner > low and not self._is_left_faster(inner):
            inner, outer, step = max(low, inner - step), inner, 2 * step
        step = 1
        while outer < high and self._is_left_faster(outer):
            inner, outer, step = outer, min(high, outer + step), 2 * step
        return last_true(self._is_left_faster, inner, outer)

    def _is_left_faster(self, index: int) -> bool:
        """Where neither half can be, the demand for memory decides which is too large."""
        left, right = self.left(index)[0], self.right(index)[0]
        if math.isinf(left) and math.isinf(right):
            return False
        return left <= right

    def _at(self, index: int) -> Solved:
        left, left_cuts = self.left(index)
        right, right_cuts = self.right(index)
        if left_cuts is None or right_cuts is None:
            return math.inf, None
        cut = int(self.search.ends[index])
        transfer = self.search.leaves.transfer_seconds(self.groups[0][1] - 1, cut)
        return max(left, right, transfer), (*left_cuts, cut, *right_cuts)

    def _around(self, found: Solved, crossing: int, low: int, high: int) -> Solved:
        """Cuts beside the crossing, as far as one half alone does not rule them out; for boundaries are unequally wide."""
        slowest = max(self.left(crossing)[0], self.right(crossing)[0])
        if found[0] <= slowest:
            return found
        for index in range(crossing - 1, low - 1, -1):
            if self.right(index)[0] >= found[0]:
                break
            found = min(found, self._at(index), key=lambda solved: solved[0])
        for index in range(crossing + 2, high + 1):
            if self.left(index)[0] >= found[0]:
                break
            found = min(found, self._at(index), key=lambda solved: solved[0])
        return found


Group = tuple[int, int]
"""The first stage of a group, and the one behind its last."""


def time_balance(
    leaves: Leaves, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """Index into `ends`, from `low` to `high`, of the last cut at which the left group is no slower than the right."""
    left, right = _speed(leaves, x), _speed(leaves, y)
    seconds = leaves.ranges.seconds

    def is_left_faster(index: int) -> bool:
        cut = int(ends[index])
        return float(seconds[cut] - seconds[start]) / left <= float(seconds[stop] - seconds[cut]) / right

    return last_true(is_left_faster, low, high)


def memory_balance(
    leaves: Leaves, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """The same for the bytes that each rank of a group must find, in the mean, beyond its capacity."""

    def is_left_emptier(index: int) -> bool:
        cut = int(ends[index])
        return _demand(leaves, x, start, cut) <= _demand(leaves, y, cut, stop)

    return last_true(is_left_emptier, low, high)


def _speed(leaves: Leaves, group: Group) -> float:
    return sum(1 / leaves.terms[stage].slowness for stage in range(*group))


def _demand(leaves: Leaves, group: Group, start: int, stop: int) -> float:
    """What a rank of `group` lacks if the range were shared out evenly: the demand of the mean stage over the range, by
    the number of stages, less the mean capacity."""
    stages = range(*group)
    count = len(stages)
    demands = sum(leaves.demand(stage, start, stop) for stage in stages) / count
    return demands / count - sum(leaves.terms[stage].capacity for stage in stages) / count
