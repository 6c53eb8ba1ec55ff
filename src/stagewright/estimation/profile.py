"""How the bytes of a rank go up and down inside its computations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.estimation.in_flight import InFlight, MemoryEvents
from stagewright.estimation.liveness import FREED
from stagewright.estimation.stage_memory import StageMemory
from stagewright.schedule import Program

Floats = NDArray[np.float64]

_MOST_STRETCHES = 16
"""Of a longer computation the lowest and the highest moment of so many stretches are kept."""


def inner_bytes(memories: Sequence[StageMemory], program: Program, rank: int) -> list[tuple[Floats, Floats]]:
    """For every action of `rank` in the lowered `program`: moments, as parts of its events, and bytes above those before it.

    Microbatches go through the same few changes, each of which is looked at once.
    Ignores: that operators take different times.
    """
    flight = InFlight(memories, program.placement.rank_of_stage, rank, is_scripted=True)
    states, events = [0] * program.num_microbatches, MemoryEvents()
    known: dict[int, tuple[Floats, Floats]] = {}
    sizes = [dict(flight.start_sizes) for _ in states]
    found: list[tuple[Floats, Floats]] = []
    for action in program.actions(rank):
        moments, above = np.zeros(1), np.zeros(1)
        for microbatch, event in events.of(action):
            step = flight.step(states[microbatch], event)
            states[microbatch] = step.after
            own = sizes[microbatch]
            own.update((key, num_bytes) for key, num_bytes in step.script if num_bytes != FREED)
            if id(step) not in known:
                changes = [-own[key] if n == FREED else n for key, n in step.script]
                known[id(step)] = _sampled(np.cumsum(np.array([0, *changes], np.float64)))
            following, more = known[id(step)]
            moments, above = np.r_[moments, following + 1.0], np.r_[above, above[-1] + more]
            moments = moments / 2.0
        found.append((moments, above))
    return found


def _sampled(alive: Floats) -> tuple[Floats, Floats]:
    count = len(alive)
    if count <= 2 * _MOST_STRETCHES:
        return np.arange(count) / max(count, 1), alive
    ends = np.linspace(0, count, _MOST_STRETCHES + 1).astype(int)
    chosen = {0, count - 1}
    for start, stop in pairwise(ends):
        chosen |= {start + int(np.argmin(alive[start:stop])), start + int(np.argmax(alive[start:stop]))}
    places = np.array(sorted(chosen))
    return places / count, alive[places]
