"""Detection, during a run, of stragglers: ranks that compute slower than planned, relative to the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from stagewright.execution.rank_runner import BatchResult
from stagewright.planning.plan import Plan
from stagewright.schedule.action import COMPUTE

_SLOW, _AS_FAST = 1.3, 1.15
"""Multiples of the median slowdown above which a rank becomes slow, and below which it is no longer slow."""

_STEPS, _SECONDS = 5, 3.0
"""Minimum number of consecutive steps, and of their seconds, before a message: a few short steps may be slow by chance."""


def slowdown_of(batch: BatchResult, plan: Plan, pipeline_rank: int, length: int) -> float:
    """Return the ratio of the time of a batch's computations on this rank to the planned time; zero if none is planned."""
    predicted = plan.by_length.get(length, plan.predictions).ranks
    if not predicted or not predicted[pipeline_rank].busy_seconds:
        return 0.0
    moments = batch.moments()
    busy = sum(moment.end - moment.start for moment in moments if moment.action.kind in COMPUTE)
    return busy / predicted[pipeline_rank].busy_seconds


class StragglerWatch:
    """A monitor of all ranks' slowdowns that reports when a rank stays slow relative to the others, and when it recovers."""

    def __init__(self, described: Callable[[int], str] = "rank {}".format) -> None:
        """Take the function that names a rank in messages."""
        self._described = described
        self._streaks: dict[int, tuple[int, float]] = {}
        """Number and seconds of the consecutive steps in which a rank differs from its reported state, by rank."""
        self._slow: set[int] = set()

    def after(self, step: int, slowdowns: Sequence[float], seconds: float) -> list[str]:
        """Return messages about step number `step`, which took `seconds`, and whose computations took each rank `slowdowns`
        times as long as planned; zero where that was not measured."""
        if not slowdowns or not all(slowdowns):
            return []
        middle = statistics.median_low(slowdowns)
        messages = []
        for rank, slowdown in enumerate(slowdowns):
            was_slow = rank in self._slow
            changes = slowdown < _AS_FAST * middle if was_slow else slowdown > _SLOW * middle
            count, taken = self._streaks.get(rank, (0, 0.0)) if changes else (-1, -seconds)
            self._streaks[rank] = count, taken = count + 1, taken + seconds
            if count < _STEPS or taken < _SECONDS:
                continue
            self._streaks[rank] = 0, 0.0
            self._slow ^= {rank}
            messages.append(
                f"{self._described(rank)} is as fast as the others again since step {step - count + 2}"
                if was_slow
                else f"{self._described(rank)} takes {slowdown / middle:.1f} times as long as the others, relative to the "
                f"plan, since step {step - count + 2}, and all wait for it: check its device, or plan again with --record"
            )
        return messages
