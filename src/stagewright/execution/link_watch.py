"""Detection, during a run, of links between ranks that stay slower than planned.

A slow neighbour makes a rank wait just as a slow link does. So links are not judged by the waiting of ranks but timed
separately, between steps that take longer than the slowest rank's computations explain.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from stagewright.execution.link_times import LinkTime

Pair = tuple[int, int]
"""Numbers of two devices, the lower first."""

_LATE = 1.2
"""Factor by which a step must exceed its planned time, scaled to the slowest rank, before links are timed."""

_SHIFT = 2.0
"""Factor by which a message, relative to computations, must exceed its planned time to count as slow; and by which a link
that the plan assumes to be slow must be faster to count as recovered."""

_PART = 0.1
"""Minimum share of a step that the excess over all microbatches must take."""

_LATE_STEPS, _LOOKS = 3, 3
"""Number of late steps after which links are timed, and of consecutive timings in which they must be slow."""

_BETWEEN, _PAUSE = 3, 10
"""Steps from one timing to the next where a shift was seen, and where none was."""

_ALIKE = 1.5
"""Factor by which two timings of a slow link may differ and still have the same search result."""


class LinkWatch:
    """The first rank's record of the times of links, which detects those that have shifted and stay so.

    `assumed` has the factors, relative to the links' figures, that the present plan assumes.
    """

    def __init__(self, plan: Plan) -> None:
        self._cluster = plan.cluster.load()
        self.assumed: dict[Pair, float] = {}
        self._step = self._next_look = self._num_late = 0
        self._recent: list[tuple[float, float]] = []
        """Median slowdown and seconds of the last steps."""
        self._looks: list[dict[Pair, float]] = []
        """Results of the last timings, while shifts are seen: the factor of every shifted link."""

    def after(self, plan: Plan, step: int, slowdowns: Sequence[float], seconds: float) -> None:
        """Record step number `step` under `plan`, whose computations took each rank `slowdowns` times as long as planned."""
        predicted = plan.by_length.get(plan.job.length_of(step), plan.predictions)
        is_late = seconds > _LATE * predicted.step_seconds * max(slowdowns)
        self._num_late = self._num_late + 1 if is_late else 0
        self._step = step
        self._recent = [*self._recent[1 - _LATE_STEPS :], (statistics.median(slowdowns), seconds)]

    @property
    def wants_look(self) -> bool:
        """Whether links should be timed after the present step."""
        is_due = self._num_late >= _LATE_STEPS or bool(self._looks) or bool(self.assumed)
        return is_due and self._step >= self._next_look

    def looked(self, plan: Plan, times: Sequence[LinkTime]) -> None:
        """Record the measured times of links."""
        slowdown, seconds = (statistics.median(figures) for figures in zip(*self._recent, strict=True))
        shifts: dict[Pair, float] = {}
        for time in times:
            pair = self._devices(plan, time)
            planned = self._planned_s(pair, time) * self.assumed.get(pair, 1.0) * slowdown
            factor = time.seconds / planned
            excess_s = (time.seconds - planned) * plan.num_microbatches
            if self._is_shifted(pair, factor, excess_s / seconds):
                shifts[pair] = factor
        self._looks = [*self._looks, shifts][-_LOOKS:] if shifts else []
        self._next_look = self._step + (_BETWEEN if shifts else _PAUSE)

    @property
    def staying(self) -> dict[Pair, float]:
        """Median factors of the links that were shifted in all of the last timings."""
        if len(self._looks) < _LOOKS:
            return {}
        pairs = set(self._looks[0]).intersection(*self._looks)
        return {pair: statistics.median(look[pair] for look in self._looks) for pair in sorted(pairs)}

    def is_still(self, shifts: Mapping[Pair, float]) -> bool:
        """Return whether the last timing had these shifts too."""
        last = self._looks[-1] if self._looks else {}
        return all(
            pair in last and 1 / _ALIKE <= last[pair] / shift <= _ALIKE for pair, shift in shifts.items()
        )

    def factors_with(self, shifts: Mapping[Pair, float]) -> dict[Pair, float]:
        """Return the factors of all links, relative to their figures, with these shifts applied."""
        return {**self.assumed, **{pair: self.assumed.get(pair, 1.0) * by for pair, by in shifts.items()}}

    def settle(self, step: int, shifts: Mapping[Pair, float] | None = None) -> None:
        """Treat the present plan as made for links with these shifts from now on, and forget the last timings."""
        factors = self.factors_with(shifts or {})
        self.assumed = {pair: factor for pair, factor in factors.items() if factor >= _SHIFT}
        self._looks, self._next_look = [], step + _PAUSE

    def _is_shifted(self, pair: Pair, factor: float, excess: float) -> bool:
        """Return whether a link that takes `factor` times the planned time, `excess` of a step in all, counts as shifted."""
        if pair in self.assumed and factor * _SHIFT <= 1.0:
            return True
        return self._num_late >= _LATE_STEPS and factor >= _SHIFT and excess >= _PART

    def _devices(self, plan: Plan, time: LinkTime) -> Pair:
        near, far = (plan.devices[rank] if plan.devices else rank for rank in time.ends)
        return min(near, far), max(near, far)

    def _planned_s(self, pair: Pair, time: LinkTime) -> float:
        """Return the seconds of a round trip by the figures of the cluster."""
        per_message = sum(self._cluster.device_of(device).message_overhead_s or 0.0 for device in pair)
        return sum(
            self._cluster.point_to_point_seconds(num_bytes, *pair) + per_message
            for num_bytes in (*time.there, *time.back)
        )


def shift_in_words(plan: Plan, shifts: Mapping[Pair, float]) -> str:
    """Describe the link that has shifted most."""
    pair = max(shifts, key=lambda link: max(shifts[link], 1 / shifts[link]))
    near, far = sorted(plan.rank_on(device) for device in pair)
    if shifts[pair] < 1.0:
        return f"the link between ranks {near} and {far} is as fast as its figures again"
    return f"the link between ranks {near} and {far} takes {shifts[pair]:.1f} times as long as planned"
