"""Contiguous partitions into stages of about equal time, within the memory of each and with small boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts


@dataclass(frozen=True)
class MemoryBudget:
    """The memory budget of every stage: its bytes, the microbatches it holds at once, and the state that a rank keeps, as
    prefix sums; by default all."""

    stage_bytes: Sequence[float]
    in_flight: Sequence[float]
    state_bytes: Floats | None = None


def partition(
    costs: Sequence[RangeCosts], slack: float = 0.0, budget: MemoryBudget | None = None
) -> list[int] | None:
    """Return the cut indices of a partition into one stage per entry of `costs`, those of one model on the device of each
    stage, or None if no partition stays within `budget`.

    The slowest stage is as fast as possible; of all partitions whose slowest stage takes at most ``1 + slack`` times that,
    the one with the smallest sum of boundaries is taken.

    Raises:
        PlanError: the model has too few legal cuts for the number of stages.
    """
    for search in _searches(costs, budget):
        cuts = search.cuts(slack)
        if cuts is not None:
            return cuts
    return None


def has_partition(costs: Sequence[RangeCosts], budget: MemoryBudget) -> bool:
    """Return whether a partition within `budget` exists.

    Raises:
        PlanError: the model has too few legal cuts for the number of stages.
    """
    return any(search.is_feasible(np.inf) for search in _searches(costs, budget))


def _searches(costs: Sequence[RangeCosts], budget: MemoryBudget | None) -> Iterator[_Stages]:
    """Yield the searches over the worthwhile cuts, then over all."""
    legal, num_stages = costs[0].legal_cuts, len(costs)
    if num_stages - 1 > len(legal):
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} cuts, but model '{costs[0].graph.name}' can be cut in only "
            f"{len(legal)} places: use at most {len(legal) + 1} stages"
        )
    worthwhile = _worthwhile(costs[0], num_stages - 1)
    yield _Stages(costs, worthwhile, budget)
    if len(worthwhile) < len(legal):
        yield _Stages(costs, legal, budget)


def _worthwhile(costs: RangeCosts, at_least: int) -> Ints:
    """Return the legal cuts without those that have a smaller boundary nearby, which splits the time as well."""
    legal = costs.legal_cuts
    spacing = costs.seconds[-1] / max(256, 32 * (at_least + 1))
    chosen = narrowest_of_each(costs, (costs.seconds[legal] / spacing).astype(int))
    return chosen if len(chosen) >= at_least else legal


def narrowest_of_each(costs: RangeCosts, intervals: NDArray[np.number]) -> Ints:
    """Return the legal cut with the smallest boundary in every interval, the first of equal ones; `intervals` has the
    interval of each legal cut."""
    legal = costs.legal_cuts
    order = np.lexsort((costs.boundary_bytes[legal], intervals))
    _, first = np.unique(intervals[order], return_index=True)
    return np.sort(legal[order[first]])


class _Stages:
    """Partitions whose cuts are among `positions`."""

    def __init__(self, costs: Sequence[RangeCosts], positions: Ints, budget: MemoryBudget | None) -> None:
        whole = costs[0]
        self.ends = np.concatenate([[0], positions, [whole.size]]).astype(np.int64)
        self.num_stages = len(costs)
        self.costs = costs
        by_device = {own_costs: own_costs.seconds[self.ends] for own_costs in dict.fromkeys(costs)}
        self.times = [by_device[own_costs] for own_costs in costs]
        self.longest_s = max(float(time[-1]) for time in by_device.values())
        self.tolerance = 1e-12 * self.longest_s
        self.width = whole.boundary_bytes[self.ends]
        self.load: list[Floats] | None = None
        self.budget = budget
        if budget is not None:
            state = whole.state_bytes if budget.state_bytes is None else budget.state_bytes
            saved = whole.saved_bytes[self.ends]
            self.load = [state[self.ends] + count * saved for count in budget.in_flight]

    def is_feasible(self, bottleneck: float) -> bool:
        return self._reach(bottleneck) is not None

    def cuts(self, slack: float) -> list[int] | None:
        if not self.is_feasible(np.inf):
            return None
        bottleneck = self._bottleneck() * (1 + slack)
        return self._narrowest(bottleneck)

    def _bottleneck(self) -> float:
        """Return the least possible time of the slowest stage, to within a millionth."""
        low, high = min(float(time[-1]) for time in self.times) / self.num_stages, self.longest_s
        if self.is_feasible(low):
            return low
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            if self.is_feasible(middle):
                high = middle
            else:
                low = middle
        return high

    def _farthest(self, stage: int, start: int, bottleneck: float) -> int:
        """Return the index of the last end that a stage from `start` may have."""
        time = self.times[stage]
        end = int(np.searchsorted(time, time[start] + bottleneck + self.tolerance, side="right")) - 1
        if self.load is not None and self.budget is not None:
            load = self.load[stage]
            limit = load[start] + self.budget.stage_bytes[stage]
            end = min(end, int(np.searchsorted(load, limit, side="right")) - 1)
        return end

    def _reach(self, bottleneck: float) -> list[int] | None:
        def farthest(stage: int, start: int) -> int:
            return self._farthest(stage, start, bottleneck)

        return ends_in_reach(farthest, self.num_stages, len(self.ends) - 1)

    def _narrowest(self, bottleneck: float) -> list[int] | None:
        """Return the cuts with the smallest sum of boundaries: a shortest path over (stage, end), with sliding windows."""
        num_ends = len(self.ends)
        total = np.full(num_ends, np.inf)
        total[0] = 0.0
        came_from: list[Ints] = []
        for farthest in self._all_farthest(bottleneck):
            reached, origin = _extended(total, farthest)
            total = reached + self.width
            came_from.append(origin)
        at = num_ends - 1
        if not np.isfinite(total[at]):
            return None
        cuts: list[int] = []
        for origin in reversed(came_from[1:]):
            at = int(origin[at])
            cuts.append(int(self.ends[at]))
        return cuts[::-1]

    def _all_farthest(self, bottleneck: float) -> Iterator[Ints]:
        """Yield, for each stage, `_farthest` of every start."""
        reach: dict[RangeCosts, Ints] = {}
        for stage, (own_costs, time) in enumerate(zip(self.costs, self.times, strict=True)):
            if own_costs not in reach:
                reach[own_costs] = np.searchsorted(time, time + bottleneck + self.tolerance, side="right") - 1
            by_time = reach[own_costs]
            if self.load is None or self.budget is None:
                yield by_time
                continue
            load = self.load[stage]
            by_load = np.searchsorted(load, load + self.budget.stage_bytes[stage], side="right") - 1
            yield np.minimum(by_time, by_load)


def ends_in_reach(farthest: Callable[[int, int], int], num_stages: int, last: int) -> list[int] | None:
    """Return ends of stages that each go as far as they may and leave at least one position to every later stage, or None if
    they do not reach `last`; `farthest` returns how far a stage may go from a start."""
    ends, start = list[int](), 0
    for stage in range(num_stages):
        end = min(farthest(stage, start), last - (num_stages - 1 - stage))
        if end <= start:
            return None
        ends.append(end)
        start = end
    return ends if start == last else None


@compiled
def _extended(total: Floats, farthest: Ints) -> tuple[Floats, Ints]:
    """Return, for each end, the least total of the starts from which the next stage may reach it, and that start.

    A window slides over the starts that reach so far, without those that precede a start of no larger total.
    """
    num_ends = len(total)
    reached, origin = np.full(num_ends, np.inf), np.full(num_ends, -1, np.int64)
    window = np.empty(num_ends, np.int64)
    first = last = 0  # the window is window[first:last]
    for end in range(1, num_ends):
        start = end - 1
        if np.isfinite(total[start]):
            while last > first and total[window[last - 1]] >= total[start]:
                last -= 1
            window[last] = start
            last += 1
        while last > first and farthest[window[first]] < end:
            first += 1
        if last > first:
            reached[end], origin[end] = total[window[first]], window[first]
    return reached, origin
