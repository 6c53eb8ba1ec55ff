"""Costs of stages over ranges of operators: their time, and the least time they must add to fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats
from stagewright.planning.partition.ranges import Ranges


@dataclass(frozen=True)
class StageTerms:
    """The conditions of a stage, from its position in the pipeline and its device.

    * `copies`: sets of saved values in flight; `versions`: number of versions of its weights, including the newest;
    * `capacity`: bytes of the rank;
    * `inverse_speed`: factor on the times of the ranges;
    * `link_s_per_byte`: to the host, infinite without offloading; `boundary_s_per_byte`: to the next stage, where
      transfers overlap with computation.
    """

    copies: float
    capacity: float
    versions: float = 1.0
    inverse_speed: float = 1.0
    link_s_per_byte: float = math.inf
    boundary_s_per_byte: float = 0.0


class StageRanges:
    """Costs of stages over ranges, each computed once; `num_evaluated` counts them.

    `cost` never decreases when operators are added, except that a longer forward hides more offloading.
    """

    def __init__(self, ranges: Ranges, terms: Sequence[StageTerms]) -> None:
        self.ranges = ranges
        self.terms = tuple(terms)
        self._costs: dict[tuple[int, int, int], float] = {}
        self._mean_terms: dict[tuple[int, int], StageTerms] = {}

    @property
    def num_stages(self) -> int:
        return len(self.terms)

    @property
    def num_evaluated(self) -> int:
        return len(self._costs)

    def cost(self, stage: int, start: int, stop: int) -> float:
        """Return the seconds of one microbatch on `stage` if it holds ``[start, stop)``, including the time it must add to
        fit; infinite if it cannot fit."""
        key = (stage, start, stop)
        if key not in self._costs:
            self._costs[key] = self.seconds(stage, start, stop) + self._overhead(stage, start, stop)
        return self._costs[key]

    def seconds(self, stage: int, start: int, stop: int) -> float:
        """Return the compute seconds of one microbatch."""
        taken = self.ranges.seconds
        return float(taken[stop] - taken[start]) * self.terms[stage].inverse_speed

    def demand(self, stage: int, start: int, stop: int) -> float:
        """Return the bytes of a stage if everything is kept."""
        return self._demand(self.terms[stage], start, stop)

    def mean_excess(self, first: int, end: int, start: int, stop: int) -> float:
        """Return by how many bytes the stages from `first` up to `end` are over on average if a range is divided evenly
        among them: their mean demand for all of it, divided by their number, less their mean capacity."""
        if (first, end) not in self._mean_terms:
            group = self.terms[first:end]
            self._mean_terms[first, end] = StageTerms(
                copies=sum(terms.copies for terms in group) / len(group),
                versions=sum(terms.versions for terms in group) / len(group),
                capacity=sum(terms.capacity for terms in group) / len(group),
            )
        terms = self._mean_terms[first, end]
        return self._demand(terms, start, stop) / (end - first) - terms.capacity

    def least_capacity(self, stage: int, start: int, stop: int) -> float:
        """Return the bytes of a stage that recomputes everything it can."""
        freed = self.terms[stage].copies * float(self.ranges.recomputable.within(start, stop).num_bytes.sum())
        return self.demand(stage, start, stop) + self.ranges.work(start, stop) - freed

    def shared(self, spans: Mapping[int, tuple[int, int]]) -> dict[int, float] | None:
        """Return the capacities of the stages of one rank, given their ranges, that together are theirs and with which they
        recompute for the least time; None where that is not enough. What lives in one stage at a time they share."""
        demands = {stage: self.demand(stage, *span) for stage, span in spans.items()}
        transients = {stage: self.ranges.most_transient(*span) for stage, span in spans.items()}
        steady = sum(demands.values()) - sum(transients.values())
        capacity = sum(self.terms[stage].capacity for stage in spans)
        if steady + max(transients.values()) <= capacity:
            return demands
        needed = steady + max(self.ranges.most_with_work(*span) for span in spans.values()) - capacity
        inside = {stage: self.ranges.recomputable.within(*span) for stage, span in spans.items()}
        sizes = np.concatenate([inside[stage].num_bytes * self.terms[stage].copies for stage in spans])
        costs = np.concatenate([inside[stage].seconds * self.terms[stage].inverse_speed for stage in spans])
        owners = np.concatenate([np.full(len(inside[stage].place), stage) for stage in spans])
        order = np.argsort(costs / np.maximum(sizes, 1e-300), kind="stable")
        freed_before = np.cumsum(sizes[order]) - sizes[order]
        freed = np.clip(needed - freed_before, 0.0, sizes[order])
        if freed.sum() < needed * (1 - 1e-12):
            return None
        freed_of = {stage: float(freed[owners[order] == stage].sum()) for stage in spans}
        return {
            stage: demands[stage] + (self.ranges.work(*spans[stage]) - freed if freed > 0 else 0.0)
            for stage, freed in freed_of.items()
        }

    def least_bytes(self) -> float:
        """Return the bytes that all stages together need, regardless of cuts, recomputation and offload."""
        ranges = self.ranges
        state = float(ranges.state_bytes[-1])
        if any(math.isfinite(terms.link_s_per_byte) for terms in self.terms):
            return state
        saved = float(ranges.saved_bytes[-1] - ranges.recomputable.num_bytes.sum())
        return state + min(terms.copies for terms in self.terms) * max(0.0, saved)

    def transfer_seconds(self, stage: int, stop: int) -> float:
        """Return the seconds of the transfer at the end of `stage`."""
        return float(self.ranges.boundary_bytes[stop]) * self.terms[stage].boundary_s_per_byte

    def _demand(self, terms: StageTerms, start: int, stop: int) -> float:
        ranges = self.ranges
        state = float(ranges.state_bytes[stop] - ranges.state_bytes[start])
        parameters = float(ranges.parameter_bytes[stop] - ranges.parameter_bytes[start])
        saved = float(ranges.saved_bytes[stop] - ranges.saved_bytes[start])
        transient = ranges.most_transient(start, stop)
        return state + (terms.versions - 1) * parameters + transient + terms.copies * saved

    def _overhead(self, stage: int, start: int, stop: int) -> float:
        terms = self.terms[stage]
        needed = self.demand(stage, start, stop) - terms.capacity
        if needed <= 0:
            return 0.0
        needed += self.ranges.work(start, stop)
        inside = self.ranges.recomputable.within(start, stop)
        sizes, costs = inside.num_bytes, inside.seconds * terms.inverse_speed
        forward = float(self.ranges.forward_seconds[stop] - self.ranges.forward_seconds[start])
        saved = float(self.ranges.saved_bytes[stop] - self.ranges.saved_bytes[start])
        return _least_mixed(terms, sizes, costs, needed, forward * terms.inverse_speed, saved)


def _least_mixed(
    terms: StageTerms, sizes: Floats, costs: Floats, needed: float, free_s: float, saved: float
) -> float:
    """Return the least time to free `needed` bytes of `saved` ones by offloading the most expensive values and recomputing
    the cheapest; infinite if that is not enough.

    The time is convex in the offloaded bytes: what is hidden within `free_s` is offloaded first, then more as long as the
    link takes less time than recomputation, or cannot be recomputed. Offloaded bytes need not be recomputed. Ignores: that
    values are indivisible.
    """
    copies, recomputable = terms.copies, float(sizes.sum())
    beyond = needed - recomputable * copies
    if copies <= 0 or math.isinf(terms.link_s_per_byte):
        return math.inf if beyond > 1e-12 * needed else least_seconds(sizes, costs, needed / copies)
    if needed > saved * copies:
        return math.inf
    cheap = costs / np.maximum(sizes, 1e-300) < terms.link_s_per_byte
    worthwhile = needed / copies - float(sizes[cheap].sum())
    hidden = free_s / terms.link_s_per_byte
    moved = max(0.0, min(max(hidden, worthwhile, beyond / copies), needed / copies))
    taken = max(0.0, moved * terms.link_s_per_byte - free_s)
    # Rounding must not ask for more than can be recomputed.
    recomputed = min(needed / copies - moved, recomputable)
    return taken + least_seconds(sizes, costs, recomputed)


def least_seconds(sizes: Floats, costs: Floats, needed: float) -> float:
    """Return the seconds to recompute `needed` bytes of values sorted by cost per byte, the last value in part; infinite if
    there are not enough.

    >>> least_seconds(np.array([2.0, 4.0]), np.array([1.0, 4.0]), 4.0)
    3.0
    """
    if needed <= 0:
        return 0.0
    cumulative = np.cumsum(sizes)
    if not len(cumulative) or cumulative[-1] < needed * (1 - 1e-12):
        return math.inf
    last = min(int(np.searchsorted(cumulative, needed)), len(cumulative) - 1)
    before = float(cumulative[last - 1]) if last else 0.0
    share = (needed - before) / max(float(sizes[last]), 1e-300)
    return float(costs[:last].sum()) + min(1.0, share) * float(costs[last])
