"""How the bytes of a rank go up and down inside its computations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.estimation.change import Event, Request
from stagewright.estimation.in_flight import InFlight, MemoryEvents
from stagewright.estimation.liveness import FREED
from stagewright.estimation.stage_memory import StageMemory
from stagewright.schedule import Program

Floats = NDArray[np.float64]

_MOST_STRETCHES = 16
"""Of a longer computation the lowest and the highest moment of so many stretches are kept."""


@dataclass(frozen=True, eq=False)
class Inner:
    """Moments of an action, as parts of its events, and the bytes at each: `alive` and `saved` (activations) above those
    before the action, `transient` that the running function has made, and `again` of these, which were there before."""

    moments: Floats
    alive: Floats
    saved: Floats
    transient: Floats
    again: Floats


def inner_bytes(
    memories: Sequence[StageMemory], program: Program, rank: int, has_slots: bool = False
) -> list[Inner]:
    """Inside every action of `rank` in the lowered `program`.

    Microbatches go through the same few changes, each of which is looked at once.
    Ignores: that operators take different times.
    """
    flight = InFlight(memories, program.placement.rank_of_stage, rank, is_scripted=True)
    states, events = [0] * program.num_microbatches, MemoryEvents(has_slots)
    known: dict[tuple[tuple[int, Event], ...], Inner] = {}
    found: list[Inner] = []
    for action in program.actions(rank):
        changes: list[tuple[int, Event]] = []
        for microbatch, event in events.of(action):
            changes.append((states[microbatch], event))
            states[microbatch] = flight.step(states[microbatch], event).after
        key = tuple(changes)
        if key not in known:
            known[key] = _of_events(flight, key)
        found.append(known[key])
    return found


def _of_events(flight: InFlight, changes: Iterable[tuple[int, Event]]) -> Inner:
    """Inside an action that makes these changes, of states by events, one after the other."""
    inner, saved = None, 0
    for state, event in changes:
        step = flight.step(state, event)
        own = _inside(step.script, flight.sizes(state))
        inner = own if inner is None else _then(inner, own, saved)
        saved += step.held
    return Inner(*np.zeros((5, 1))) if inner is None else inner


def _inside(script: Sequence[Request], sizes: dict[int, int]) -> Inner:
    """Of one event, before which there are storages of `sizes`: before each of its requests and after the last."""
    sizes = sizes | {each.key: each.num_bytes for each in script if each.num_bytes != FREED}
    changes = [-sizes[each.key] if each.num_bytes == FREED else each.num_bytes for each in script]
    alive = np.cumsum(np.array([0, *changes], np.float64))
    parts = np.array([(0, 0, 0), *((each.saved, each.transient, each.again) for each in script)], np.float64)
    places = _sampled(alive)
    return Inner(places / max(len(alive), 1), alive[places], *parts[places].T)


def _then(first: Inner, second: Inner, saved: int) -> Inner:
    """One event after the other, each in half of the time; the first has left so many more bytes `saved`."""
    return Inner(
        np.r_[first.moments, second.moments + 1.0] / 2.0,
        np.r_[first.alive, first.alive[-1] + second.alive],
        np.r_[first.saved, saved + second.saved],
        np.r_[first.transient, second.transient],
        np.r_[first.again, second.again],
    )


def _sampled(alive: Floats) -> NDArray[np.int64]:
    """The places of moments that say how far the bytes go up and down."""
    count = len(alive)
    if count <= 2 * _MOST_STRETCHES:
        return np.arange(count)
    ends = np.linspace(0, count, _MOST_STRETCHES + 1).astype(int)
    chosen = {0, count - 1}
    for start, stop in pairwise(ends):
        chosen |= {start + int(np.argmin(alive[start:stop])), start + int(np.argmax(alive[start:stop]))}
    return np.array(sorted(chosen))
