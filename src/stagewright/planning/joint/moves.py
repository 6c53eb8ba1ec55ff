"""Compiled local improvement of a program: single passes moved within their rank's order."""

from __future__ import annotations

import numba
import numpy as np

from stagewright.schedule.list_scheduler.terms import FORWARD, INPUT_GRAD, TINY

_GONE = -1.0


@numba.njit(cache=True, nogil=True)
def time_order(stages, num_microbatches, passes, which, give_up_s):
    """Makespan of an order (see `kernels.Order`); infinite where it gets stuck, exceeds the memory of a rank or
    takes longer than `give_up_s`."""
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    forward_end = np.full((num_stages, num_microbatches), _GONE)
    input_grad_end = np.full((num_stages, num_microbatches), _GONE)
    count = np.zeros((3, num_stages), np.int64)
    clock = np.zeros(num_ranks)
    memory = np.zeros(num_ranks)
    at = 3 * num_microbatches * stages.offsets
    last = num_stages - 1
    left = len(passes)
    moved = True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while at[rank] < 3 * num_microbatches * stages.offsets[rank + 1]:
                kind, stage = passes[at[rank]], which[at[rank]]
                m = count[kind, stage]
                begin = clock[rank]
                if kind == FORWARD:
                    if stage > 0:
                        arrival = forward_end[stage - 1, m]
                        if arrival < 0.0:
                            break
                        begin = max(begin, arrival + stages.hop[stage])
                    memory[rank] += stages.saved[stage]
                    if memory[rank] > stages.limit[rank] * (1.0 + TINY):
                        return np.inf
                    clock[rank] = begin + stages.forward[stage]
                    forward_end[stage, m] = clock[rank]
                elif kind == INPUT_GRAD:
                    if m >= count[FORWARD, stage]:
                        break
                    if stage == last:
                        begin = max(begin, forward_end[stage, m])
                    else:
                        arrival = input_grad_end[stage + 1, m]
                        if arrival < 0.0:
                            break
                        begin = max(begin, arrival + stages.hop[stage + 1])
                    memory[rank] -= stages.saved[stage] - stages.held[stage]
                    clock[rank] = begin + stages.input_grad[stage]
                    input_grad_end[stage, m] = clock[rank]
                else:
                    if m >= count[INPUT_GRAD, stage]:
                        break
                    memory[rank] -= stages.held[stage]
                    clock[rank] = begin + stages.weight_grad[stage]
                if clock[rank] > give_up_s:
                    return np.inf
                count[kind, stage] = m + 1
                at[rank] += 1
                left -= 1
                moved = True
    return clock.max() if left == 0 else np.inf


@numba.njit(cache=True, nogil=True)
def improve_order(stages, num_microbatches, passes, which, num_steps, start_share, good_enough_s, seed):
    """The best order found by moving passes to nearby places, and its makespan.

    Steps that lengthen the order are accepted as in `anneal.anneal`.
    """
    np.random.seed(seed)
    num_ranks = len(stages.offsets) - 1
    current = time_order(stages, num_microbatches, passes, which, np.inf)
    best, best_passes, best_which = current, passes.copy(), which.copy()
    passes, which = passes.copy(), which.copy()
    for step in range(num_steps):
        if best <= good_enough_s:
            break
        rank = np.random.randint(num_ranks)
        low = 3 * num_microbatches * stages.offsets[rank]
        high = 3 * num_microbatches * stages.offsets[rank + 1]
        source = np.random.randint(low, high)
        distance = 1 + int(8 * np.random.random() ** 3)
        target = source + distance if np.random.random() < 0.5 else source - distance
        target = min(max(target, low), high - 1)
        if passes[source] == passes[target] and which[source] == which[target]:
            continue
        _shift(passes, source, target)
        _shift(which, source, target)
        share = start_share * (0.01 ** (step / num_steps))
        limit = current - share * best * np.log(1.0 - np.random.random())
        makespan = time_order(stages, num_microbatches, passes, which, limit)
        if makespan <= limit:
            current = makespan
            if makespan < best:
                best, best_passes, best_which = makespan, passes.copy(), which.copy()
        else:
            _shift(passes, target, source)
            _shift(which, target, source)
    return best, best_passes, best_which


@numba.njit(cache=True, nogil=True)
def _shift(row, source, target):
    """Take the entry at `source` out and put it in at `target`."""
    entry = row[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
    row[target] = entry
