"""Which links between ranks stay slower than planned, seen while a run goes on.

A slow neighbour makes a rank wait as a slow link does. So links are not judged by what ranks wait, but timed by themselves,
between steps that take longer than the slowest rank's computations explain.
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
"""Times as long as planned, at the pace of the slowest rank, that a step must take before links are timed."""

_SHIFT = 2.0
"""Times as long as planned, beside computations, that a message must take to count as slow; as quick, for a link that the
plan was made for as a slow one, to count as that no more."""

_PART = 0.1
"""Of a step, that the time above what is planned must make up over all microbatches."""

_LATE_STEPS, _LOOKS = 3, 3
"""After so many late steps links are timed, and so often they must be slow in turn."""

_BETWEEN, _PAUSE = 3, 10
"""Steps from one look to the next where something was seen, and where nothing was."""

_ALIKE = 1.5
"""Times by which two looks at a slow link may differ and a search for the one be one for the other."""


class LinkWatch:
    """Hears on the first rank what links take, and knows which of them have shifted and stay so.

    `assumed` are factors that the present plan was made for, beside the links' figures.
    """

    def __init__(self, plan: Plan) -> None:
        self._cluster = plan.cluster.load()
        self.assumed: dict[Pair, float] = {}
        self._step = self._next_look = self._num_late = 0
        self._recent: list[tuple[float, float]] = []
        """Of the last steps, the middle pace and the seconds."""
        self._looks: list[dict[Pair, float]] = []
        """The last ones, as long as something was seen: of every link that has shifted, by how much."""

    def after(self, plan: Plan, step: int, paces: Sequence[float], seconds: float) -> None:
        """Step number `step` is done under `plan`, in which each rank took `paces` times as long as planned to compute."""
        predicted = plan.by_length.get(plan.job.length_of(step), plan.predictions)
        is_late = seconds > _LATE * predicted.step_seconds * max(paces)
        self._num_late = self._num_late + 1 if is_late else 0
        self._step = step
        self._recent = [*self._recent[1 - _LATE_STEPS :], (statistics.median(paces), seconds)]

    @property
    def wants_look(self) -> bool:
        """Whether links should be timed behind the present step."""
        is_due = self._num_late >= _LATE_STEPS or bool(self._looks) or bool(self.assumed)
        return is_due and self._step >= self._next_look

    def looked(self, plan: Plan, times: Sequence[LinkTime]) -> None:
        """Links were timed."""
        pace, seconds = (statistics.median(figures) for figures in zip(*self._recent, strict=True))
        found: dict[Pair, float] = {}
        for time in times:
            pair = self._devices(plan, time)
            planned = self._planned_s(pair, time) * self.assumed.get(pair, 1.0) * pace
            factor = time.seconds / planned
            excess_s = (time.seconds - planned) * plan.num_microbatches
            if self._is_shifted(pair, factor, excess_s / seconds):
                found[pair] = factor
        self._looks = [*self._looks, found][-_LOOKS:] if found else []
        self._next_look = self._step + (_BETWEEN if found else _PAUSE)

    @property
    def staying(self) -> dict[Pair, float]:
        """By how much those links have shifted that were seen so in all of the last looks."""
        if len(self._looks) < _LOOKS:
            return {}
        pairs = set(self._looks[0]).intersection(*self._looks)
        return {pair: statistics.median(look[pair] for look in self._looks) for pair in sorted(pairs)}

    def is_still(self, shifts: Mapping[Pair, float]) -> bool:
        """Whether the last look saw these, too."""
        last = self._looks[-1] if self._looks else {}
        return all(
            pair in last and 1 / _ALIKE <= last[pair] / shift <= _ALIKE for pair, shift in shifts.items()
        )

    def beside_figures(self, shifts: Mapping[Pair, float]) -> dict[Pair, float]:
        """Factors of all links as they are with these shifts."""
        return {**self.assumed, **{pair: self.assumed.get(pair, 1.0) * by for pair, by in shifts.items()}}

    def settle(self, step: int, shifts: Mapping[Pair, float] | None = None) -> None:
        """What was seen is answered: the present plan is the one for links with these shifts from now on."""
        found = self.beside_figures(shifts or {})
        self.assumed = {pair: factor for pair, factor in found.items() if factor >= _SHIFT}
        self._looks, self._next_look = [], step + _PAUSE

    def _is_shifted(self, pair: Pair, factor: float, excess: float) -> bool:
        """Whether a link takes so many times as long as planned, `excess` of a step in all, and that counts."""
        if pair in self.assumed and factor * _SHIFT <= 1.0:
            return True
        return self._num_late >= _LATE_STEPS and factor >= _SHIFT and excess >= _PART

    def _devices(self, plan: Plan, time: LinkTime) -> Pair:
        near, far = (plan.devices[rank] if plan.devices else rank for rank in time.ends)
        return min(near, far), max(near, far)

    def _planned_s(self, pair: Pair, time: LinkTime) -> float:
        """Of the round trip, by the figures of the cluster."""
        per_message = sum(self._cluster.device_of(device).message_overhead_s or 0.0 for device in pair)
        return sum(
            self._cluster.point_to_point_seconds(num_bytes, *pair) + per_message
            for num_bytes in (*time.there, *time.back)
        )


def shift_in_words(plan: Plan, shifts: Mapping[Pair, float]) -> str:
    """The link that has shifted most, in words."""
    pair = max(shifts, key=lambda one: max(shifts[one], 1 / shifts[one]))
    near, far = sorted(plan.rank_on(device) for device in pair)
    if shifts[pair] < 1.0:
        return f"the link between ranks {near} and {far} takes as long as its figures say again"
    return f"the link between ranks {near} and {far} takes {shifts[pair]:.1f} times as long as planned"
