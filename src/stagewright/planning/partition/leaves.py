"""What a stage takes on a given rank: its time, and the least time it must add to fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.arrays import Floats
from stagewright.planning.partition.ranges import Ranges


@dataclass(frozen=True)
class Terms:
    """What a stage has to cope with, by its place in the pipeline and its device.

    * `copies`: sets of saved values in flight; `versions`: of its weights, the newest included;
    * `capacity`: bytes of the rank;
    * `state_share`: part of the state that one replica keeps;
    * `slowness`: its times over those of the ranges;
    * `link_s_per_byte`: to the host, infinite for no offloading; `boundary_s_per_byte`: to the next stage, where
      transfers overlap with computation.
    """

    copies: float
    capacity: float
    versions: float = 1.0
    slowness: float = 1.0
    link_s_per_byte: float = math.inf
    boundary_s_per_byte: float = 0.0
    state_share: float = 1.0

    def with_capacity(self, capacity: float) -> Terms:
        return replace(self, capacity=capacity)


class Leaves:
    """Costs of stages over ranges, each worked out once; `num_evaluated` counts them.

    `cost` is non-decreasing in the range (more operators never take less time or memory) but for what offloading hides: a
    longer forward hides more.
    """

    def __init__(self, ranges: Ranges, terms: Sequence[Terms]) -> None:
        self.ranges = ranges
        self.terms = tuple(terms)
        self._known: dict[tuple[int, int, int], float] = {}

    @property
    def num_stages(self) -> int:
        return len(self.terms)

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def cost(self, stage: int, start: int, stop: int) -> float:
        """Seconds of one microbatch on `stage` if it holds ``[start, stop)``, what fitting costs included; infinite if it
        cannot fit."""
        key = (stage, start, stop)
        if key not in self._known:
            self._known[key] = self.seconds(stage, start, stop) + self._overhead(stage, start, stop)
        return self._known[key]

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Computation alone."""
        taken = self.ranges.seconds
        return float(taken[stop] - taken[start]) * self.terms[stage].slowness

    def demand(self, stage: int, start: int, stop: int) -> float:
        """Bytes if everything is kept."""
        terms, ranges = self.terms[stage], self.ranges
        saved = float(ranges.saved_bytes[stop] - ranges.saved_bytes[start])
        return self._static(stage, start, stop) + terms.copies * saved

    def least_bytes(self) -> float:
        """Bytes of all stages together that are needed wherever the model is cut and whatever goes again."""
        ranges = self.ranges
        state = min(one.state_share for one in self.terms) * float(ranges.state_bytes[-1])
        if any(math.isfinite(one.link_s_per_byte) for one in self.terms):
            return state
        saved = float(ranges.saved_bytes[-1] - ranges.recomputable.num_bytes.sum())
        return state + min(one.copies for one in self.terms) * max(0.0, saved)

    def transfer_seconds(self, stage: int, stop: int) -> float:
        """Of what crosses the end of `stage`."""
        return float(self.ranges.boundary_bytes[stop]) * self.terms[stage].boundary_s_per_byte

    def _static(self, stage: int, start: int, stop: int) -> float:
        terms, ranges = self.terms[stage], self.ranges
        state = float(ranges.state_bytes[stop] - ranges.state_bytes[start])
        parameters = float(ranges.parameter_bytes[stop] - ranges.parameter_bytes[start])
        return (
            terms.state_share * state + (terms.versions - 1) * parameters + ranges.most_transient(start, stop)
        )

    def _overhead(self, stage: int, start: int, stop: int) -> float:
        terms = self.terms[stage]
        needed = self.demand(stage, start, stop) - terms.capacity
        if needed <= 0:
            return 0.0
        needed += self.ranges.most_with_work(start, stop) - self.ranges.most_transient(start, stop)
        given = self.ranges.recomputable
        inside = (given.place >= start) & (given.place < stop)
        sizes, costs = given.num_bytes[inside], given.seconds[inside] * terms.slowness
        forward = float(self.ranges.forward_seconds[stop] - self.ranges.forward_seconds[start])
        return _least_mixed(terms, sizes, costs, needed, forward * terms.slowness)


def _least_mixed(terms: Terms, sizes: Floats, costs: Floats, needed: float, free_s: float) -> float:
    """Least time to save `needed` bytes by offloading the values that cost most and recomputing those that cost least.

    The time is convex in the bytes offloaded: what hides in `free_s` is offloaded first, and more as long as the link takes
    less time for it than recomputing does. Bytes offloaded leave fewer to recompute. Ignores: that values are whole.
    """
    copies = parked = terms.copies
    most = float(sizes.sum()) * copies - needed
    if most < -1e-12 * needed:
        return math.inf
    if parked <= 0 or math.isinf(terms.link_s_per_byte):
        return least_seconds(sizes, costs, needed / copies)
    cheap = costs / np.maximum(sizes, 1e-300) * parked < terms.link_s_per_byte * copies
    worthwhile = (needed - float(sizes[cheap].sum()) * copies) / parked
    hidden = free_s / terms.link_s_per_byte
    moved = max(0.0, min(max(hidden, worthwhile), needed / parked, most))
    taken = max(0.0, moved * terms.link_s_per_byte - free_s)
    return taken + least_seconds(sizes, costs, (needed - parked * moved) / copies)


def least_seconds(sizes: Floats, costs: Floats, needed: float) -> float:
    """Time to recompute `needed` bytes of values sorted by cost per byte, the last of them in part; infinite if there are
    not enough.

    >>> least_seconds(np.array([2.0, 4.0]), np.array([1.0, 4.0]), 4.0)
    3.0
    """
    if needed <= 0:
        return 0.0
    have = np.cumsum(sizes)
    if not len(have) or have[-1] < needed * (1 - 1e-12):
        return math.inf
    last = min(int(np.searchsorted(have, needed)), len(have) - 1)
    before = float(have[last - 1]) if last else 0.0
    share = (needed - before) / max(float(sizes[last]), 1e-300)
    return float(costs[:last].sum()) + min(1.0, share) * float(costs[last])
