"""Compiled annealing over what is there in front of every phase of a backward (see `reruns`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bools, Floats, Ints
from stagewright.compiled import compiled

_WHOLE = 0.3
"""Share of moves that change a storage for the whole backward."""
_THERE = 0.45
"""Share of moves that have it there."""
_INSTEAD = 0.2
"""Share of moves that do the opposite to another storage."""
_BY_SIZE = 0.5
"""Share of draws that look for a large storage."""
_WITHIN = 1e-9
"""Of the limit: excess that is none."""
_NEVER = 1e6
"""Seconds for what cannot be made again."""


class Arrays(NamedTuple):
    """Storages, operators and phases, by number; lists of lists are flat, with where each begins.

    `maker[v]`: operator that makes storage v, -1 if none; `last[v]`: the last phase that it can be of use in, -1 if none.
    `held[i]` are the bytes alive at operator i of the forward whatever is kept, and `made[i, v]` says that v was made before
    and is alive there only if it is kept. `before`, `during` and `after` are the bytes of the backward's own in front of the
    phase's operator, with it, and at most from then to the next phase; `others` are sets of what is kept beside the one in
    use.
    """

    sizes: Floats
    maker: Ints
    last: Ints
    seconds: Floats
    reads: Ints
    reads_from: Ints
    makes: Ints
    makes_from: Ints
    uses: Ints
    uses_from: Ints
    held: Floats
    made: Bools
    before: Floats
    during: Floats
    after: Floats
    others: float


@compiled
def run_phase(phase, here, there_next, arrays, last, runs):
    """Seconds and peak of a phase with the storages `here` in front of it and `there_next` behind it; sets `runs`, the
    operators that run again, and `last`, where in the phase each storage is used last."""
    num_operators, num_storages = len(arrays.seconds), len(arrays.sizes)
    seconds = 0.0
    for v in range(num_storages):
        last[v] = num_operators + 1 if there_next[v] else -1
    for k in range(arrays.uses_from[phase], arrays.uses_from[phase + 1]):
        last[arrays.uses[k]] = max(last[arrays.uses[k]], num_operators)
    live = arrays.before[phase]
    for v in range(num_storages):
        if last[v] >= 0 and not here[v] and arrays.maker[v] < 0:
            seconds += _NEVER
    for o in range(num_operators - 1, -1, -1):
        runs[o] = False
        for k in range(arrays.makes_from[o], arrays.makes_from[o + 1]):
            v = arrays.makes[k]
            if last[v] >= 0 and not here[v]:
                runs[o] = True
        if runs[o]:
            seconds += arrays.seconds[o]
            for k in range(arrays.reads_from[o], arrays.reads_from[o + 1]):
                v = arrays.reads[k]
                last[v] = max(last[v], o)
                if arrays.maker[v] < 0 and not here[v]:
                    seconds += _NEVER
    for v in range(num_storages):
        if here[v] and last[v] >= 0:
            live += arrays.sizes[v]
    peak = live
    for o in range(num_operators):
        if runs[o]:
            fleeting = 0.0
            for k in range(arrays.makes_from[o], arrays.makes_from[o + 1]):
                v = arrays.makes[k]
                if here[v] or last[v] < 0:
                    fleeting += arrays.sizes[v]
                else:
                    live += arrays.sizes[v]
            peak = max(peak, live + fleeting)
            for k in range(arrays.reads_from[o], arrays.reads_from[o + 1]):
                if last[arrays.reads[k]] == o:
                    live -= arrays.sizes[arrays.reads[k]]
    own = arrays.before[phase]
    peak = max(peak, live - own + arrays.during[phase])
    for k in range(arrays.uses_from[phase], arrays.uses_from[phase + 1]):
        if last[arrays.uses[k]] == num_operators:
            live -= arrays.sizes[arrays.uses[k]]
    return seconds, max(peak, live - own + arrays.after[phase])


@compiled
def forward_peak(kept, arrays):
    """Of the forward, with the storages `kept` from it."""
    peak = 0.0
    for i in range(len(arrays.held)):
        live = arrays.held[i]
        for v in range(len(arrays.sizes)):
            if arrays.made[i, v] and kept[v]:
                live += arrays.sizes[v]
        peak = max(peak, live)
    return peak


@compiled
def _excess(peaks, forward, kept, arrays, limit):
    """Bytes above `limit`, of the forward and all phases together, over the limit."""
    room = limit
    for v in range(len(kept)):
        if kept[v]:
            room -= arrays.others * arrays.sizes[v]
    total = max(0.0, forward - room)
    for t in range(len(peaks)):
        total += max(0.0, peaks[t] - room)
    return total / limit


@compiled
def _drawn(by_size):
    """A storage, rather a large one; `by_size` are sums of their sizes."""
    if np.random.random() < _BY_SIZE:
        return min(np.searchsorted(by_size, np.random.random() * by_size[-1]), len(by_size) - 1)
    return np.random.randint(len(by_size))


@compiled
def anneal(there, arrays, limit, steps, seed, hot, cold, weight):
    """The least seconds found within `limit` bytes, infinite if none, and what is there then.

    `there[t, v]`: storage v is there in front of phase t, from the forward or made again; one row more than phases. Starts
    from it, with temperatures from `hot` to `cold` in parts of the forward's seconds; `weight` is what bytes above the limit
    count, in these over parts of the limit.
    """
    np.random.seed(seed)
    num_phases, num_operators, num_storages = len(arrays.before), len(arrays.seconds), len(arrays.sizes)
    scale = max(arrays.seconds.sum(), 1e-30)
    last, runs = np.empty(num_storages, np.int64), np.zeros(num_operators, np.bool_)
    times, peaks = np.zeros(num_phases), np.zeros(num_phases)
    new_times, new_peaks = np.zeros(num_phases), np.zeros(num_phases)
    seconds = 0.0
    for t in range(num_phases):
        times[t], peaks[t] = run_phase(t, there[t], there[t + 1], arrays, last, runs)
        seconds += times[t]
    forward = forward_peak(there[0], arrays)
    excess = _excess(peaks, forward, there[0], arrays, limit)
    best, least = there.copy(), seconds if excess <= _WITHIN else np.inf
    by_size = arrays.sizes.cumsum()
    before = np.zeros((2, num_phases), np.bool_)
    chosen = np.zeros(2, np.int64)
    for step in range(steps):
        chosen[0] = _drawn(by_size)
        if arrays.last[chosen[0]] < 0:
            continue
        start, stop = 0, arrays.last[chosen[0]] + 1
        if np.random.random() >= _WHOLE:
            start = np.random.randint(stop)
            stop = min(stop, start + 1 + int(num_phases * np.random.random() ** 3))
        value = np.random.random() < _THERE
        count = 1
        if np.random.random() < _INSTEAD:
            chosen[1] = _drawn(by_size)
            count = 1 if chosen[1] == chosen[0] else 2
        first, final = num_phases, -1
        for k in range(count):
            v = chosen[k]
            for t in range(start, min(stop, arrays.last[v] + 1)):
                before[k, t] = there[t, v]
                if there[t, v] != value:
                    first, final = min(first, t), max(final, t)
                there[t, v] = value
            value = not value
        if final < 0:
            continue
        from_phase = max(0, first - 1)
        new_seconds, new_forward = seconds, forward
        for t in range(from_phase, final + 1):
            new_times[t], new_peaks[t] = run_phase(t, there[t], there[t + 1], arrays, last, runs)
            new_seconds += new_times[t] - times[t]
        for t in range(from_phase, final + 1):
            new_peaks[t], peaks[t] = peaks[t], new_peaks[t]
        if first == 0:
            new_forward = forward_peak(there[0], arrays)
        new_excess = _excess(peaks, new_forward, there[0], arrays, limit)
        change = (new_seconds - seconds) / scale + weight * (new_excess - excess)
        temperature = hot * (cold / hot) ** (step / steps)
        if change <= 0 or np.random.random() < math.exp(-change / temperature):
            seconds, forward, excess = new_seconds, new_forward, new_excess
            for t in range(from_phase, final + 1):
                times[t] = new_times[t]
            if excess <= _WITHIN and seconds < least * (1 - 1e-9):
                least = seconds
                best[:] = there
        else:
            for t in range(from_phase, final + 1):
                peaks[t] = new_peaks[t]
            for k in range(count):
                v = chosen[k]
                for t in range(start, min(stop, arrays.last[v] + 1)):
                    there[t, v] = before[k, t]
    return least, best


@compiled
def reruns_of(there, arrays):
    """Operators that run again in each phase, as a matrix."""
    num_phases, num_operators = len(arrays.before), len(arrays.seconds)
    last, runs = np.empty(len(arrays.sizes), np.int64), np.zeros(num_operators, np.bool_)
    found = np.zeros((num_phases, num_operators), np.bool_)
    for t in range(num_phases):
        run_phase(t, there[t], there[t + 1], arrays, last, runs)
        for o in range(num_operators):
            found[t, o] = runs[o]
    return found


@compiled
def peak_of(there, arrays):
    """The most bytes of the forward and all phases, other sets included."""
    last, runs = np.empty(len(arrays.sizes), np.int64), np.zeros(len(arrays.seconds), np.bool_)
    peak = forward_peak(there[0], arrays)
    for t in range(len(arrays.before)):
        peak = max(peak, run_phase(t, there[t], there[t + 1], arrays, last, runs)[1])
    for v in range(len(arrays.sizes)):
        if there[0, v]:
            peak += arrays.others * arrays.sizes[v]
    return peak
