"""How far ahead each stage may run and in what order passes should, compiled."""

from __future__ import annotations

import numba
import numpy as np

from stagewright.schedule.list_scheduler.arrivals import rank_seconds
from stagewright.schedule.list_scheduler.terms import Due

NO_BACKLOG = 1 << 40


@numba.njit(cache=True, nogil=True)
def window_of(stages, depth):
    """Most microbatches each stage may hold between forward and input gradient.

    A microbatch stays for the passes of all deeper stages, and a new one comes as often as the busiest rank
    allows, so full speed needs the quotient of the two; `depth` times that are admitted.
    """
    num_stages = len(stages.rank)
    if depth > 1e6:
        return np.full(num_stages, NO_BACKLOG)
    cycle = max(rank_seconds(stages).max(), 1e-30)
    window = np.empty(num_stages, np.int64)
    stay = 0.0
    for stage in range(num_stages - 1, -1, -1):
        stay += stages.forward[stage] + stages.input_grad[stage]
        if stage + 1 < num_stages:
            stay += 2.0 * stages.hop[stage + 1]
        window[stage] = max(1, int(np.ceil(depth * stay / cycle - 1e-9)))
    return window


@numba.njit(cache=True, nogil=True)
def due_dates(stages, rule, shifts):
    """When each pass of microbatch 0 should run: `stretch` times the passes before it, and its shift.

    A microbatch follows the one before by the seconds of the busiest rank. So an input gradient goes before
    the forward of a microbatch that is further behind than the stretched time the first one took from one
    to the other: with a larger stretch ranks begin with more forwards. `shifts` are seconds per layer for
    forwards, then for input gradients; then shares per layer by which microbatches follow each other more
    slowly, for both. So forwards of a rank may run further and further ahead.

    Without a stretch they are the microbatches, and of one microbatch the shallowest forward and the deepest input gradient
    first; or the depth alone, deepest first: for forwards with `deep_forwards`, for input gradients unless `oldest`.
    """
    num_stages = len(stages.rank)
    forward, input_grad = np.empty(num_stages), np.empty(num_stages)
    at = 0.0
    for stage in range(num_stages):
        at += stages.hop[stage]
        forward[stage] = rule.stretch * at + shifts[0, stages.start[stage]]
        at += stages.forward[stage]
    for stage in range(num_stages - 1, -1, -1):
        input_grad[stage] = rule.stretch * at + shifts[1, stages.start[stage]]
        at += stages.input_grad[stage] + stages.hop[stage]
    cycle = rank_seconds(stages).max()
    pace = np.empty((2, num_stages))
    for stage in range(num_stages):
        for row in range(2):
            pace[row, stage] = cycle * (1.0 + shifts[2 + row, stages.start[stage]])
    if rule.stretch <= 0.0:
        input_grad = -np.arange(num_stages) / num_stages
        forward = input_grad if rule.deep_forwards else -input_grad
        pace[0] = 0.0 if rule.deep_forwards else 1.0
        pace[1] = 1.0 if rule.oldest else 0.0
    return Due(forward, input_grad, pace[0], pace[1], cycle)
