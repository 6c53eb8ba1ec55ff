"""Compiled annealing over the storages present before every phase of a backward (see `reruns`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bools, Floats, Ints
from stagewright.compiled import compiled

_WHOLE = 0.3
"""Share of moves that change a storage for the whole backward."""
_PRESENT = 0.45
"""Share of moves that make it present."""
_INSTEAD = 0.2
"""Share of moves that do the opposite to another storage."""
_BY_SIZE = 0.5
"""Share of draws that prefer large storages."""
_WITHIN = 1e-9
"""Fraction of the limit by which an excess is still zero."""
_NEVER = 1e6
"""Seconds charged for what cannot be recomputed."""


class Arrays(NamedTuple):
    """Storages, operators and phases, by number; lists of lists are flat, with the offset of each.

    `maker[v]`: operator that allocates storage v, -1 if none; `last[v]`: the last phase in which it can be of use, -1 if
    none. `base[i]` are the bytes alive at operator i of the forward in any case; `if_kept[i, v]` is whether v was allocated
    before it and is alive there only if kept. `before`, `during` and `after` are the bytes of the backward's own results
    before the phase's operator, with it, and at most from then to the next phase; `other_sets` is the number of sets of kept
    values besides the one in use.
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
    base: Floats
    if_kept: Bools
    before: Floats
    during: Floats
    after: Floats
    other_sets: float


@compiled
def run_phase(phase, present, present_next, arrays, last, runs):
    """Return seconds and peak of a phase with the storages `present` before it and `present_next` after it.

    Sets `runs`, the operators that are recomputed, and `last`, the last use of each storage within the phase.
    """
    num_operators, num_storages = len(arrays.seconds), len(arrays.sizes)
    seconds = 0.0
    for v in range(num_storages):
        last[v] = num_operators + 1 if present_next[v] else -1
    for k in range(arrays.uses_from[phase], arrays.uses_from[phase + 1]):
        last[arrays.uses[k]] = max(last[arrays.uses[k]], num_operators)
    live = arrays.before[phase]
    for v in range(num_storages):
        if last[v] >= 0 and not present[v] and arrays.maker[v] < 0:
            seconds += _NEVER
    for o in range(num_operators - 1, -1, -1):
        runs[o] = False
        for k in range(arrays.makes_from[o], arrays.makes_from[o + 1]):
            v = arrays.makes[k]
            if last[v] >= 0 and not present[v]:
                runs[o] = True
        if runs[o]:
            seconds += arrays.seconds[o]
            for k in range(arrays.reads_from[o], arrays.reads_from[o + 1]):
                v = arrays.reads[k]
                last[v] = max(last[v], o)
                if arrays.maker[v] < 0 and not present[v]:
                    seconds += _NEVER
    for v in range(num_storages):
        if present[v] and last[v] >= 0:
            live += arrays.sizes[v]
    peak = live
    for o in range(num_operators):
        if runs[o]:
            fleeting = 0.0
            for k in range(arrays.makes_from[o], arrays.makes_from[o + 1]):
                v = arrays.makes[k]
                if present[v] or last[v] < 0:
                    fleeting += arrays.sizes[v]
                else:
                    live += arrays.sizes[v]
            peak = max(peak, live + fleeting)
            for k in range(arrays.reads_from[o], arrays.reads_from[o + 1]):
                if last[arrays.reads[k]] == o:
                    live -= arrays.sizes[arrays.reads[k]]
    start_bytes = arrays.before[phase]
    peak = max(peak, live - start_bytes + arrays.during[phase])
    for k in range(arrays.uses_from[phase], arrays.uses_from[phase + 1]):
        if last[arrays.uses[k]] == num_operators:
            live -= arrays.sizes[arrays.uses[k]]
    return seconds, max(peak, live - start_bytes + arrays.after[phase])


@compiled
def forward_peak(kept, arrays):
    """Return the peak bytes of the forward with the storages `kept` from it."""
    peak = 0.0
    for i in range(len(arrays.base)):
        live = arrays.base[i]
        for v in range(len(arrays.sizes)):
            if arrays.if_kept[i, v] and kept[v]:
                live += arrays.sizes[v]
        peak = max(peak, live)
    return peak


@compiled
def _excess(peaks, forward, kept, arrays, limit):
    """Return the bytes above `limit`, summed over the forward and all phases, divided by the limit."""
    headroom = limit
    for v in range(len(kept)):
        if kept[v]:
            headroom -= arrays.other_sets * arrays.sizes[v]
    total = max(0.0, forward - headroom)
    for t in range(len(peaks)):
        total += max(0.0, peaks[t] - headroom)
    return total / limit


@compiled
def _drawn(by_size):
    """Return a random storage, preferably a large one; `by_size` are prefix sums of the sizes."""
    if np.random.random() < _BY_SIZE:
        return min(np.searchsorted(by_size, np.random.random() * by_size[-1]), len(by_size) - 1)
    return np.random.randint(len(by_size))


@compiled
def anneal(present, arrays, limit, steps, seed, hot, cold, weight):
    """Return the fewest seconds found within `limit` bytes, infinite if none, and the storages present then.

    `present[t, v]`: whether storage v is present before phase t, kept from the forward or recomputed; it has one row more
    than phases. The search starts from it, with temperatures from `hot` to `cold` as fractions of the forward's seconds;
    `weight` is the cost of bytes above the limit, in fractions of the forward's seconds per fraction of the limit.
    """
    np.random.seed(seed)
    num_phases, num_operators, num_storages = len(arrays.before), len(arrays.seconds), len(arrays.sizes)
    scale = max(arrays.seconds.sum(), 1e-30)
    last, runs = np.empty(num_storages, np.int64), np.zeros(num_operators, np.bool_)
    times, peaks = np.zeros(num_phases), np.zeros(num_phases)
    new_times, new_peaks = np.zeros(num_phases), np.zeros(num_phases)
    seconds = 0.0
    for t in range(num_phases):
        times[t], peaks[t] = run_phase(t, present[t], present[t + 1], arrays, last, runs)
        seconds += times[t]
    forward = forward_peak(present[0], arrays)
    excess = _excess(peaks, forward, present[0], arrays, limit)
    best, least = present.copy(), seconds if excess <= _WITHIN else np.inf
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
        value = np.random.random() < _PRESENT
        count = 1
        if np.random.random() < _INSTEAD:
            chosen[1] = _drawn(by_size)
            count = 1 if chosen[1] == chosen[0] else 2
        first, final = num_phases, -1
        for k in range(count):
            v = chosen[k]
            for t in range(start, min(stop, arrays.last[v] + 1)):
                before[k, t] = present[t, v]
                if present[t, v] != value:
                    first, final = min(first, t), max(final, t)
                present[t, v] = value
            value = not value
        if final < 0:
            continue
        from_phase = max(0, first - 1)
        new_seconds, new_forward = seconds, forward
        for t in range(from_phase, final + 1):
            new_times[t], new_peaks[t] = run_phase(t, present[t], present[t + 1], arrays, last, runs)
            new_seconds += new_times[t] - times[t]
        for t in range(from_phase, final + 1):
            new_peaks[t], peaks[t] = peaks[t], new_peaks[t]
        if first == 0:
            new_forward = forward_peak(present[0], arrays)
        new_excess = _excess(peaks, new_forward, present[0], arrays, limit)
        change = (new_seconds - seconds) / scale + weight * (new_excess - excess)
        temperature = hot * (cold / hot) ** (step / steps)
        if change <= 0 or np.random.random() < math.exp(-change / temperature):
            seconds, forward, excess = new_seconds, new_forward, new_excess
            for t in range(from_phase, final + 1):
                times[t] = new_times[t]
            if excess <= _WITHIN and seconds < least * (1 - 1e-9):
                least = seconds
                best[:] = present
        else:
            for t in range(from_phase, final + 1):
                peaks[t] = new_peaks[t]
            for k in range(count):
                v = chosen[k]
                for t in range(start, min(stop, arrays.last[v] + 1)):
                    present[t, v] = before[k, t]
    return least, best


@compiled
def reruns_of(present, arrays):
    """Return the operators that are recomputed in each phase, as a matrix."""
    num_phases, num_operators = len(arrays.before), len(arrays.seconds)
    last, runs = np.empty(len(arrays.sizes), np.int64), np.zeros(num_operators, np.bool_)
    reruns = np.zeros((num_phases, num_operators), np.bool_)
    for t in range(num_phases):
        run_phase(t, present[t], present[t + 1], arrays, last, runs)
        for o in range(num_operators):
            reruns[t, o] = runs[o]
    return reruns


@compiled
def peak_of(present, arrays):
    """Return the peak bytes of the forward and all phases, other sets included."""
    last, runs = np.empty(len(arrays.sizes), np.int64), np.zeros(len(arrays.seconds), np.bool_)
    peak = forward_peak(present[0], arrays)
    for t in range(len(arrays.before)):
        peak = max(peak, run_phase(t, present[t], present[t + 1], arrays, last, runs)[1])
    for v in range(len(arrays.sizes)):
        if present[0, v]:
            peak += arrays.other_sets * arrays.sizes[v]
    return peak
