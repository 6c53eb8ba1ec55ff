"""Which ranks compute slower than planned beside the others, seen while a run goes on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from stagewright.execution.rank_runner import BatchResult
from stagewright.planning.plan import Plan
from stagewright.schedule.action import COMPUTE

_SLOW, _AS_FAST = 1.3, 1.15
"""Times the pace of the middle rank from which on one counts as slow, and below which no longer."""

_STEPS, _SECONDS = 5, 3.0
"""One after the other that take so long at the least, before a word is said: of short steps any few may be slow."""


def pace_of(batch: BatchResult, plan: Plan, pipeline_rank: int, length: int) -> float:
    """How many times as long as planned the computations of a batch took on this rank; zero where nothing is planned."""
    predicted = plan.by_length.get(length, plan.predictions).ranks
    if not predicted or not predicted[pipeline_rank].busy_seconds:
        return 0.0
    moments = batch.moments()
    busy = sum(moment.end - moment.start for moment in moments if moment.action.kind in COMPUTE)
    return busy / predicted[pipeline_rank].busy_seconds


class StragglerWatch:
    """Hears after every step how every rank did, and says when one stays slow beside the others, or no longer."""

    def __init__(self) -> None:
        self._streaks: dict[int, tuple[int, float]] = {}
        """Of every rank, steps in which it is not as it was told, and what they took."""
        self._slow: set[int] = set()

    def after(self, step: int, paces: Sequence[float], seconds: float) -> list[str]:
        """Messages about step number `step`, which took `seconds` and of which each rank took `paces` times as long as
        planned to compute; zero where that was not looked at."""
        if not paces or not all(paces):
            return []
        middle = statistics.median_low(paces)
        said = []
        for rank, pace in enumerate(paces):
            was_slow = rank in self._slow
            changes = pace < _AS_FAST * middle if was_slow else pace > _SLOW * middle
            count, taken = self._streaks.get(rank, (0, 0.0)) if changes else (-1, -seconds)
            self._streaks[rank] = count, taken = count + 1, taken + seconds
            if count < _STEPS or taken < _SECONDS:
                continue
            self._streaks[rank] = 0, 0.0
            self._slow ^= {rank}
            said.append(
                f"rank {rank} is as fast as the others again since step {step - count + 2}"
                if was_slow
                else f"rank {rank} takes {pace / middle:.1f} times as long as the others, beside what is planned for each, "
                f"since step {step - count + 2}, and all wait for it: look at its device, or plan again with --record"
            )
        return said
