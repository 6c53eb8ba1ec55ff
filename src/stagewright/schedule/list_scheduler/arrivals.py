"""Arrival times of the inputs of forwards and input gradients, compiled: dependencies of `TokenRules` for a chain of stages,
with transfer times.

Microbatches pass every stage in order. That is no restriction: microbatches are equal, so the k-th forward of a stage can
always be that of microbatch k.
"""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled, compiled_helper
from stagewright.schedule.list_scheduler.terms import FORWARD


@compiled_helper
def arrival(kind, stage, stages, progress):
    """Return when the input of the next forward or input gradient of `stage` arrives; infinite while unknown and after the
    last.

    `progress` describes what has run: the ends `forward_end` and `input_grad_end`, [stage, microbatch], and the counts
    `num_forward` and `num_input_grad` per stage.
    """
    if kind == FORWARD:
        m = progress.num_forward[stage]
        if stage == 0:
            return 0.0 if m < progress.forward_end.shape[1] else np.inf
        if m >= progress.num_forward[stage - 1]:
            return np.inf
        return progress.forward_end[stage - 1, m] + stages.transfer[stage]
    m = progress.num_input_grad[stage]
    if m >= progress.num_forward[stage]:
        return np.inf
    if stage == len(stages.rank) - 1:
        return progress.forward_end[stage, m]
    if m >= progress.num_input_grad[stage + 1]:
        return np.inf
    return progress.input_grad_end[stage + 1, m] + stages.transfer[stage + 1]


@compiled
def first_arrivals(stages):
    """Return the earliest time at which the first value can reach each rank."""
    first = np.full(len(stages.offsets) - 1, np.inf)
    at = 0.0
    for stage in range(len(stages.rank)):
        at += stages.transfer[stage]
        first[stages.rank[stage]] = min(first[stages.rank[stage]], at)
        at += stages.forward[stage]
    return first


@compiled
def rank_seconds(stages):
    """Return the compute seconds of each rank per microbatch."""
    seconds = np.zeros(len(stages.offsets) - 1)
    for stage in range(len(stages.rank)):
        seconds[stages.rank[stage]] += (
            stages.forward[stage] + stages.input_grad[stage] + stages.weight_grad[stage]
        )
    return seconds
