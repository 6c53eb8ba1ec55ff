"""The difference of two timelines of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import InputError
from stagewright.schedule.action import Action
from stagewright.simulation.timeline import Event, Timeline

Floats = NDArray[np.float64]


class Moved(NamedTuple):
    """An action that both timelines have, and what changed; seconds, second minus first."""

    action: Action
    ranks: tuple[int, int]
    start_s: float
    duration_s: float


@dataclass(frozen=True, eq=False)
class Difference:
    """Second minus first: seconds and bytes, per rank where they are arrays."""

    makespan_s: float
    bubble_fraction: float
    busy_s: Floats
    idle_s: Floats
    peak_bytes: Floats
    moved: tuple[Moved, ...]
    """Actions that run at another time, for another time or on another rank, by their start in the first."""
    only_first: tuple[Action, ...]
    only_second: tuple[Action, ...]

    @property
    def first_moved(self) -> Moved | None:
        """Where the timelines part, or ``None`` when their common actions run alike."""
        return self.moved[0] if self.moved else None


def difference(first: Timeline, second: Timeline) -> Difference:
    """How `second` differs from `first`; both must have as many ranks.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> costs = StageCosts.uniform(2, saved_bytes=8)
    >>> change = difference(simulate(build("gpipe", 2, 4), costs), simulate(build("1f1b", 2, 4), costs))
    >>> change.makespan_s, change.peak_bytes.tolist(), str(change.first_moved.action)
    (0.0, [-16.0, -24.0], '0F2')
    """
    if first.num_ranks != second.num_ranks:
        raise InputError(f"timelines of {first.num_ranks} and {second.num_ranks} ranks cannot be compared")
    events = [_events(timeline) for timeline in (first, second)]
    common = [action for action in events[0] if action in events[1]]
    pairs = [(events[0][action], events[1][action]) for action in common]
    moved = [
        Moved(
            a.action, (a.rank, b.rank), b.start_s - a.start_s, (b.end_s - b.start_s) - (a.end_s - a.start_s)
        )
        for a, b in sorted(pairs, key=lambda pair: pair[0].start_s)
        if (a.rank, a.start_s, a.end_s) != (b.rank, b.start_s, b.end_s)
    ]
    return Difference(
        second.makespan_s - first.makespan_s,
        second.bubble_fraction - first.bubble_fraction,
        second.busy_s - first.busy_s,
        second.idle_s - first.idle_s,
        second.peak_bytes - first.peak_bytes,
        tuple(moved),
        tuple(action for action in events[0] if action not in events[1]),
        tuple(action for action in events[1] if action not in events[0]),
    )


def _events(timeline: Timeline) -> dict[Action, Event]:
    """The last event of every action."""
    return {event.action: event for rank in range(timeline.num_ranks) for event in timeline.events(rank)}
