"""Compiled timing of an order of forwards and input gradients, into which weight gradients are filled.

An order lists, per rank, the forwards and input gradients as two arrays: the pass (`FORWARD` or `INPUT_GRAD`) and the
stage, -1 behind the end of a shorter row. Microbatches run in increasing order in every stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from stagewright.schedule.list_scheduler.terms import FORWARD, TINY, WEIGHT_GRAD, Floats, Ints

Orders = NDArray[np.int16]

helper = numba.njit(cache=True, _nrt=False)  # pyright: ignore[reportCallIssue]: no public option


class FillRule(NamedTuple):
    """When a weight gradient runs before the next forward or input gradient, beside when memory must be
    freed.

    When the rank would otherwise idle for at least `share` of its time; and, if `levels`, when idling would make this
    rank the one that has idled longest.
    """

    share: float
    levels: bool


class State(NamedTuple):
    """Where a timing stands."""

    value_at: Floats  # [stage, microbatch] end of the forward
    gradient_at: Floats
    num_forward: Ints
    num_input_grad: Ints
    clock: Floats
    first: Floats
    idle: Floats
    memory: Floats
    peak: Floats
    slack: Floats  # how long each rank may still idle
    waiting: Orders  # [rank, :] stages of the weight gradients in order of their input gradients
    head: Ints
    tail: Ints
    reached: Ints


class Out(NamedTuple):
    """The complete order, with weight gradients; rows are ranks."""

    passes: Orders
    stages: Orders
    length: Ints


@numba.njit(cache=True, nogil=True)
def new_state(stages, num_microbatches):
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    most = num_microbatches * np.diff(stages.offsets).max()
    return State(
        np.empty((num_stages, num_microbatches)), np.empty((num_stages, num_microbatches)),
        np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64),
        np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.empty((num_ranks, most), np.int16),
        np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64),
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def new_out(num_ranks, length):
    return Out(
        np.full((num_ranks, length), -1, np.int16),
        np.full((num_ranks, length), -1, np.int16),
        np.zeros(num_ranks, np.int64),
    )


@numba.njit(cache=True, nogil=True)
def first_arrivals(stages):
    """When the first value can reach each rank."""
    arrival = np.full(len(stages.offsets) - 1, np.inf)
    at = 0.0
    for stage in range(len(stages.rank)):
        at += stages.hop[stage]
        arrival[stages.rank[stage]] = min(arrival[stages.rank[stage]], at)
        at += stages.forward[stage]
    return arrival


@numba.njit(cache=True, nogil=True)
def least_times(stages, num_microbatches, by_span):
    """The seconds of each rank's span, or of the makespan, if the rank never idles after its first pass."""
    least = np.zeros(len(stages.offsets) - 1)
    for stage in range(len(stages.rank)):
        seconds = stages.forward[stage] + stages.input_grad[stage] + stages.weight_grad[stage]
        least[stages.rank[stage]] += num_microbatches * seconds
    return least if by_span else least + first_arrivals(stages)


@helper
def time_order(passes, which, stages, rule, by_span, least, give_up_s, state, out):
    """The longest span of a rank if `by_span`, else the makespan; infinite if the order cannot run, or once it
    takes longer than `give_up_s` (see `least_times`).

    The complete order goes to `out` where that has room for one.
    """
    num_ranks, length = passes.shape
    _reset(least, give_up_s, state, out)
    records = out.passes.shape[1] > 0
    longest_idle = 0.0
    moved = True
    down = False
    while moved:
        moved = False
        down = not down
        for place in range(num_ranks):
            # values travel down the ranks, gradients up
            rank = place if down else num_ranks - 1 - place
            at = state.reached[rank]
            while at < length and which[rank, at] >= 0:
                kind, stage = passes[rank, at], which[rank, at]
                arrival = _arrival(kind, stage, stages, state)
                if arrival < 0.0:
                    break
                if not _fill(rank, kind, stage, arrival, longest_idle, stages, state, rule, out, records):
                    return np.inf
                idle = _run(rank, kind, stage, arrival, stages, state, out, records)
                if idle > state.slack[rank]:
                    return np.inf
                longest_idle = max(longest_idle, idle)
                at += 1
                moved = True
            state.reached[rank] = at
    seconds = 0.0
    for rank in range(num_ranks):
        at = state.reached[rank]
        if at < length and which[rank, at] >= 0:
            return np.inf
        while state.head[rank] < state.tail[rank]:
            _run_weight_grad(rank, stages, state, out, records)
        seconds = max(seconds, state.clock[rank] - (max(state.first[rank], 0.0) if by_span else 0.0))
    return seconds


@helper
def _reset(least, give_up_s, state, out):
    for stage in range(len(state.num_forward)):
        state.num_forward[stage] = 0
        state.num_input_grad[stage] = 0
    for rank in range(len(state.clock)):
        state.clock[rank] = 0.0
        state.first[rank] = -1.0
        state.idle[rank] = 0.0
        state.memory[rank] = 0.0
        state.peak[rank] = 0.0
        state.slack[rank] = give_up_s - least[rank] + TINY
        state.head[rank] = 0
        state.tail[rank] = 0
        state.reached[rank] = 0
        out.length[rank] = 0


@helper
def _arrival(kind, stage, stages, state):
    """When the next forward or input gradient of `stage` has its inputs; negative if unknown."""
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        m = state.num_forward[stage]
        if m >= state.num_forward[stage - 1]:
            return -1.0
        return state.value_at[stage - 1, m] + stages.hop[stage]
    m = state.num_input_grad[stage]
    if m >= state.num_forward[stage]:
        return -1.0
    if stage == len(stages.rank) - 1:
        return state.value_at[stage, m]
    if m >= state.num_input_grad[stage + 1]:
        return -1.0
    return state.gradient_at[stage + 1, m] + stages.hop[stage + 1]


@helper
def _fill(rank, kind, stage, arrival, longest_idle, stages, state, rule, out, records):
    """Run the weight gradients that `rule` wants before the next pass of `rank`; false if that has no memory then."""
    most = stages.limit[rank] * (1.0 + TINY) - (stages.saved[stage] if kind == FORWARD else 0.0)
    while state.head[rank] < state.tail[rank]:
        gap = arrival - state.clock[rank]
        is_full = kind == FORWARD and state.memory[rank] > most
        if not is_full:
            if gap <= TINY:
                return True
            seconds = stages.weight_grad[state.waiting[rank, state.head[rank]]]
            is_worst = rule.levels and state.idle[rank] + gap > longest_idle + TINY
            if gap < rule.share * seconds - TINY and not is_worst:
                return True
        _run_weight_grad(rank, stages, state, out, records)
    return kind != FORWARD or state.memory[rank] <= most


@helper
def _run(rank, kind, stage, arrival, stages, state, out, records):
    """Run a forward or input gradient; return how long its rank has idled between its passes so far."""
    if state.first[rank] < 0.0:
        state.clock[rank] = max(arrival, state.clock[rank])
        state.first[rank] = state.clock[rank]
    state.idle[rank] += max(0.0, arrival - state.clock[rank])
    begin = max(arrival, state.clock[rank])
    if kind == FORWARD:
        state.clock[rank] = begin + stages.forward[stage]
        state.value_at[stage, state.num_forward[stage]] = state.clock[rank]
        state.num_forward[stage] += 1
        state.memory[rank] += stages.saved[stage]
        state.peak[rank] = max(state.peak[rank], state.memory[rank])
    else:
        state.clock[rank] = begin + stages.input_grad[stage]
        state.gradient_at[stage, state.num_input_grad[stage]] = state.clock[rank]
        state.num_input_grad[stage] += 1
        state.memory[rank] -= stages.saved[stage] - stages.held[stage]
        state.waiting[rank, state.tail[rank]] = stage
        state.tail[rank] += 1
    if records:
        _append(rank, kind, stage, out)
    return state.idle[rank]


@helper
def _run_weight_grad(rank, stages, state, out, records):
    stage = state.waiting[rank, state.head[rank]]
    state.head[rank] += 1
    state.clock[rank] += stages.weight_grad[stage]
    state.memory[rank] -= stages.held[stage]
    if records:
        _append(rank, WEIGHT_GRAD, stage, out)


@helper
def _append(rank, kind, stage, out):
    out.passes[rank, out.length[rank]] = kind
    out.stages[rank, out.length[rank]] = stage
    out.length[rank] += 1
