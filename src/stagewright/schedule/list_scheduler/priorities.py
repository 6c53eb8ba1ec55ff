"""Windows and deadlines of a list schedule, compiled: how far ahead a stage may run, and in what order
forwards and input gradients should."""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled
from stagewright.schedule.list_scheduler.arrivals import rank_seconds
from stagewright.schedule.list_scheduler.terms import Deadlines

UNLIMITED = 1 << 40


@compiled
def window_of(stages, depth):
    """Return the maximum microbatches of each stage between forward and input gradient.

    A microbatch stays until all deeper stages have run its forward and input gradient, and a new one comes as often as the
    busiest rank allows, so full speed needs the quotient of the two times; `depth` times that number are admitted.
    """
    num_stages = len(stages.rank)
    if depth > 1e6:
        return np.full(num_stages, UNLIMITED)
    cycle = max(rank_seconds(stages).max(), 1e-30)
    window = np.empty(num_stages, np.int64)
    stay = 0.0
    for stage in range(num_stages - 1, -1, -1):
        stay += stages.forward[stage] + stages.input_grad[stage]
        if stage + 1 < num_stages:
            stay += 2.0 * stages.transfer[stage + 1]
        window[stage] = max(1, int(np.ceil(depth * stay / cycle - 1e-9)))
    return window


@compiled
def deadlines_of(stages, rule, shifts):
    """Return when each forward and input gradient of microbatch 0 should run: `deadline_scale` times the seconds of those
    before it, plus its shift.

    Microbatches follow each other at the seconds of the busiest rank. So an input gradient goes before the forward of a
    microbatch that is further back than the scaled time from that forward to that input gradient: with a larger
    `deadline_scale` ranks begin with more forwards. `shifts` are seconds per layer for forwards, then for input gradients;
    then fractions per layer by which microbatches follow each other more slowly, for both. So forwards of a rank may run
    further and further ahead.

    With a `deadline_scale` of 0 actions are ordered by microbatch, and within a microbatch the shallowest forward and the
    deepest input gradient come first; or by depth alone, deepest first: forwards with `deep_forwards`, input gradients
    unless `oldest`.
    """
    num_stages = len(stages.rank)
    forward, input_grad = np.empty(num_stages), np.empty(num_stages)
    at = 0.0
    for stage in range(num_stages):
        at += stages.transfer[stage]
        forward[stage] = rule.deadline_scale * at + shifts[0, stages.start[stage]]
        at += stages.forward[stage]
    for stage in range(num_stages - 1, -1, -1):
        input_grad[stage] = rule.deadline_scale * at + shifts[1, stages.start[stage]]
        at += stages.input_grad[stage] + stages.transfer[stage]
    cycle = rank_seconds(stages).max()
    interval = np.empty((2, num_stages))
    for stage in range(num_stages):
        for row in range(2):
            interval[row, stage] = cycle * (1.0 + shifts[2 + row, stages.start[stage]])
    if rule.deadline_scale <= 0.0:
        input_grad = -np.arange(num_stages) / num_stages
        forward = input_grad if rule.deep_forwards else -input_grad
        interval[0] = 0.0 if rule.deep_forwards else 1.0
        interval[1] = 1.0 if rule.oldest else 0.0
    return Deadlines(forward, input_grad, interval[0], interval[1], cycle)
