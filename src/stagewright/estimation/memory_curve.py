"""Memory curves of a rank inside its actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats
from stagewright.estimation.liveness import FREED
from stagewright.estimation.memory_events import Event, StorageEvent
from stagewright.estimation.microbatch_memory import MemoryEvents, MicrobatchStates
from stagewright.estimation.stage_memory import StageMemory
from stagewright.schedule import Program

_NUM_INTERVALS = 16
"""Number of intervals of a long computation of which the lowest and the highest moment are kept."""


@dataclass(frozen=True, eq=False)
class ActionCurve:
    """Moments of an action, as fractions of its events, and the bytes at each: `alive` and `saved` (activations) relative to
    those before the action, `transient` bytes of the running function, and `again` of these, which are recomputed."""

    moments: Floats
    alive: Floats
    saved: Floats
    transient: Floats
    again: Floats


def action_curves(
    memories: Sequence[StageMemory], program: Program, rank: int, has_slots: bool = False
) -> list[ActionCurve]:
    """Return the curve inside every action of `rank` in the lowered `program`.

    Microbatches go through the same few transitions, each of which is computed once. Ignores: that operators take different
    times.
    """
    microbatches = MicrobatchStates(memories, program.placement.rank_of_stage, rank, is_scripted=True)
    states, events = [0] * program.num_microbatches, MemoryEvents(has_slots)
    curves: dict[tuple[tuple[int, Event], ...], ActionCurve] = {}
    result: list[ActionCurve] = []
    for action in program.actions(rank):
        changes: list[tuple[int, Event]] = []
        for microbatch, event in events.of(action):
            changes.append((states[microbatch], event))
            states[microbatch] = microbatches.step(states[microbatch], event).after
        key = tuple(changes)
        if key not in curves:
            curves[key] = _of_events(microbatches, key)
        result.append(curves[key])
    return result


def _of_events(microbatches: MicrobatchStates, changes: Iterable[tuple[int, Event]]) -> ActionCurve:
    """Return the curve of an action that consists of these (state, event) transitions."""
    total, saved = None, 0
    for state, event in changes:
        step = microbatches.step(state, event)
        curve = _inside(step.script, microbatches.sizes(state))
        total = curve if total is None else _concatenated(total, curve, saved)
        saved += step.held
    return ActionCurve(*np.zeros((5, 1))) if total is None else total


def _inside(script: Sequence[StorageEvent], sizes: dict[int, int]) -> ActionCurve:
    """Return the curve of one event after which storages have `sizes`: before each allocation or free, and after the
    last."""
    sizes = sizes | {event.key: event.num_bytes for event in script if event.num_bytes != FREED}
    changes = [-sizes[event.key] if event.num_bytes == FREED else event.num_bytes for event in script]
    alive = np.cumsum(np.array([0, *changes], np.float64))
    parts = np.array(
        [(0, 0, 0), *((event.saved, event.transient, event.again) for event in script)], np.float64
    )
    places = _sampled(alive)
    return ActionCurve(places / max(len(alive), 1), alive[places], *parts[places].T)


def _concatenated(first: ActionCurve, second: ActionCurve, saved: int) -> ActionCurve:
    """Concatenate two curves, each in half of the time; the first one has added `saved` bytes of activations."""
    return ActionCurve(
        np.r_[first.moments, second.moments + 1.0] / 2.0,
        np.r_[first.alive, first.alive[-1] + second.alive],
        np.r_[first.saved, saved + second.saved],
        np.r_[first.transient, second.transient],
        np.r_[first.again, second.again],
    )


def _sampled(alive: Floats) -> NDArray[np.int64]:
    """Return the indices of the moments to keep: local minima and maxima."""
    count = len(alive)
    if count <= 2 * _NUM_INTERVALS:
        return np.arange(count)
    ends = np.linspace(0, count, _NUM_INTERVALS + 1).astype(int)
    chosen = {0, count - 1}
    for start, stop in pairwise(ends):
        chosen |= {start + int(np.argmin(alive[start:stop])), start + int(np.argmax(alive[start:stop]))}
    return np.array(sorted(chosen))
