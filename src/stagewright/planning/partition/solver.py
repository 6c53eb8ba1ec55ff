"""Contiguous partitions: stages of equal time within the memory of each, cut where little crosses."""

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
    """Bytes each stage may take, how many microbatches it holds at once, and what part of its state it keeps."""

    stage_bytes: Sequence[float]
    in_flight: Sequence[float]
    state_share: float = 1.0


def partition(
    costs: Sequence[RangeCosts], slack: float = 0.0, budget: MemoryBudget | None = None
) -> list[int] | None:
    """Cut positions of as many stages as there are `costs`, of one model on the device of each, or None if no partition
    stays within `budget`.

    The slowest stage is as fast as can be; of all partitions whose slowest stage takes at most ``1 + slack``
    times that, the one whose boundaries are narrowest in sum.

    Raises:
        PlanError: the model has too few legal cuts for so many stages.
    """
    for search in _searches(costs, budget):
        cuts = search.cuts(slack)
        if cuts is not None:
            return cuts
    return None


def has_partition(costs: Sequence[RangeCosts], budget: MemoryBudget) -> bool:
    """Whether `partition` would find one.

    Raises:
        PlanError: the model has too few legal cuts for so many stages.
    """
    return any(one.is_feasible(np.inf) for one in _searches(costs, budget))


def _searches(costs: Sequence[RangeCosts], budget: MemoryBudget | None) -> Iterator[_Stages]:
    """Over the cuts that are worth while, then over all."""
    legal, num_stages = costs[0].legal_cuts, len(costs)
    if num_stages - 1 > len(legal):
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} cuts, but model '{costs[0].graph.name}' can be cut at "
            f"{len(legal)} places only: use at most {len(legal) + 1} stages"
        )
    worthwhile = _worthwhile(costs[0], num_stages - 1)
    yield _Stages(costs, worthwhile, budget)
    if len(worthwhile) < len(legal):
        yield _Stages(costs, legal, budget)


def _worthwhile(costs: RangeCosts, at_least: int) -> Ints:
    """Legal cuts without those that have a narrower one beside them that splits the time all the same."""
    legal = costs.legal_cuts
    spacing = costs.seconds[-1] / max(256, 32 * (at_least + 1))
    chosen = narrowest_of_each(costs, (costs.seconds[legal] / spacing).astype(int))
    return chosen if len(chosen) >= at_least else legal


def narrowest_of_each(costs: RangeCosts, stretches: NDArray[np.number]) -> Ints:
    """The legal cut of every stretch that least crosses, the first of equal ones; `stretches` has that of each legal cut."""
    legal = costs.legal_cuts
    order = np.lexsort((costs.boundary_bytes[legal], stretches))
    _, first = np.unique(stretches[order], return_index=True)
    return np.sort(legal[order[first]])


class _Stages:
    """Partitions whose cuts are among `positions`."""

    def __init__(self, costs: Sequence[RangeCosts], positions: Ints, budget: MemoryBudget | None) -> None:
        whole = costs[0]
        self.ends = np.concatenate([[0], positions, [whole.size]]).astype(np.int64)
        self.num_stages = len(costs)
        by_device = {id(one): one.seconds[self.ends] for one in costs}
        self.times = [by_device[id(one)] for one in costs]
        self.longest_s = max(float(time[-1]) for time in by_device.values())
        self.tolerance = 1e-12 * self.longest_s
        self.width = whole.boundary_bytes[self.ends]
        self.load: list[Floats] | None = None
        self.budget = budget
        if budget is not None:
            state, saved = whole.state_bytes[self.ends], whole.saved_bytes[self.ends]
            self.load = [budget.state_share * state + count * saved for count in budget.in_flight]

    def is_feasible(self, bottleneck: float) -> bool:
        return self._reach(bottleneck) is not None

    def cuts(self, slack: float) -> list[int] | None:
        if not self.is_feasible(np.inf):
            return None
        bottleneck = self._bottleneck() * (1 + slack)
        return self._narrowest(bottleneck)

    def _bottleneck(self) -> float:
        """The least time of the slowest stage, to within a millionth."""
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
        """Index of the last end that a stage from `start` may have."""
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
        """The cuts of least total width: a shortest path over (stage, end), each stage a sliding window."""
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
        """Per stage: `_farthest` of every start."""
        known: dict[int, Ints] = {}
        for stage, time in enumerate(self.times):
            if id(time) not in known:
                known[id(time)] = np.searchsorted(time, time + bottleneck + self.tolerance, side="right") - 1
            by_time = known[id(time)]
            if self.load is None or self.budget is None:
                yield by_time
                continue
            load = self.load[stage]
            by_load = np.searchsorted(load, load + self.budget.stage_bytes[stage], side="right") - 1
            yield np.minimum(by_time, by_load)


def ends_in_reach(farthest: Callable[[int, int], int], num_stages: int, last: int) -> list[int] | None:
    """Ends of stages that each go as far as they may and leave at least one place to every later one, or None if that does
    not cover all up to `last`; `farthest` says how far a stage may go from a start."""
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
    """The least total of any start from which the next stage may end at each end, and that start; a window slides over the
    starts that reach so far, those behind a lesser one left out."""
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
