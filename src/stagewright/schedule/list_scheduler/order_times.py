"""Timing of a given order of actions, compiled.

An order lists the weight gradients too, or only forwards and input gradients, into which weight gradients are then filled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled, compiled_helper
from stagewright.schedule.list_scheduler.arrivals import arrival, first_arrivals, rank_seconds
from stagewright.schedule.list_scheduler.terms import FORWARD, TINY, WEIGHT_GRAD, Order


class FillRule(NamedTuple):
    """When a weight gradient runs before the next forward or input gradient, apart from when memory must be freed.

    It runs when the rank would otherwise idle for at least `share` of its time; and, if `levels`, when idling would make
    this rank the one with the most idle time.
    """

    share: float
    levels: bool


class TimingState(NamedTuple):
    """State of a timing."""

    forward_end: Floats  # [stage, microbatch]
    input_grad_end: Floats
    num_forward: Ints
    num_input_grad: Ints
    num_weight_grad: Ints
    clock: Floats
    first: Floats
    idle: Floats
    memory: Floats
    peak: Floats
    slack: Floats  # how long each rank may still idle
    waiting: (
        Ints  # stages of the weight gradients in order of their input gradients; rank r from M offsets[r] on
    )
    head: Ints
    tail: Ints
    reached: Ints
    written: Ints  # where the complete order of each rank goes on


@compiled
def new_state(stages, num_microbatches):
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    return TimingState(
        np.empty((num_stages, num_microbatches)), np.empty((num_stages, num_microbatches)),
        np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64),
        np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.empty(num_stages * num_microbatches, np.int64),
        np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
    )  # fmt: skip


@compiled
def new_order(length):
    return Order(np.empty(length, np.int8), np.empty(length, np.int16))


@compiled
def least_times(stages, num_microbatches, by_span):
    """Return the seconds of each rank's span, or the makespan, if the rank never idles after its first pass."""
    least = num_microbatches * rank_seconds(stages)
    return least if by_span else least + first_arrivals(stages)


@compiled_helper
def time_order(order, stages, rule, by_span, least, give_up_s, state, complete):
    """Return the longest span of a rank if `by_span`, else the makespan; infinite if the order gets stuck, exceeds the
    memory of a rank, or takes longer than `give_up_s` (see `least_times`).

    `rule` says how weight gradients are filled in; None: the order lists them. The order with the filled-in ones is written
    to `complete` if that has space for one.
    """
    num_ranks, per_stage = len(state.clock), len(order.kinds) // len(stages.rank)
    _reset(stages, per_stage, least, give_up_s, state)
    longest_idle = 0.0
    moved = True
    down = False
    while moved:
        moved = False
        down = rule is None or not down
        for place in range(num_ranks):
            # values travel down the ranks, gradients up; longer orders go one way in fewer rounds
            rank = place if down else num_ranks - 1 - place
            first, last = per_stage * stages.offsets[rank], per_stage * stages.offsets[rank + 1]
            at, clock, idle, memory = (
                state.reached[rank],
                state.clock[rank],
                state.idle[rank],
                state.memory[rank],
            )
            most = stages.limit[rank] * (1.0 + TINY)
            while at < last:
                kind, stage = order.kinds[at], order.stages[at]
                if rule is None and kind == WEIGHT_GRAD:
                    if state.num_weight_grad[stage] >= state.num_input_grad[stage]:
                        break
                    state.num_weight_grad[stage] += 1
                    clock += stages.weight_grad[stage]
                    memory -= stages.held[stage]
                    at += 1
                    continue
                arrives = arrival(kind, stage, stages, state)
                if arrives == np.inf:
                    break
                if rule is not None:
                    most_before = most - stages.saved[stage] if kind == FORWARD else np.inf
                    most_idle = longest_idle - idle if rule.levels else np.inf
                    clock, memory = _fill(
                        rank, arrives, most_before, most_idle, clock, memory, stages, state, rule, complete
                    )
                if arrives > clock:
                    if at > first:
                        idle += arrives - clock
                        if idle > state.slack[rank]:
                            return np.inf
                        longest_idle = max(longest_idle, idle)
                    else:
                        state.first[rank] = arrives
                    clock = arrives
                if kind == FORWARD:
                    if memory > most - stages.saved[stage]:
                        return np.inf
                    clock += stages.forward[stage]
                    memory += stages.saved[stage]
                    state.forward_end[stage, state.num_forward[stage]] = clock
                    state.num_forward[stage] += 1
                    if rule is not None:
                        state.peak[rank] = max(state.peak[rank], memory)
                else:
                    clock += stages.input_grad[stage]
                    memory -= stages.saved[stage] - stages.held[stage]
                    state.input_grad_end[stage, state.num_input_grad[stage]] = clock
                    state.num_input_grad[stage] += 1
                    if rule is not None:
                        state.waiting[state.tail[rank]] = stage
                        state.tail[rank] += 1
                if rule is not None:
                    _write(rank, kind, stage, state, complete)
                at += 1
            moved |= at > state.reached[rank]
            state.reached[rank], state.clock[rank], state.idle[rank], state.memory[rank] = (
                at,
                clock,
                idle,
                memory,
            )
    seconds = 0.0
    for rank in range(num_ranks):
        if state.reached[rank] < per_stage * stages.offsets[rank + 1]:
            return np.inf
        clock = state.clock[rank]
        if rule is not None:
            while state.head[rank] < state.tail[rank]:
                clock += stages.weight_grad[_next_waiting(rank, state, complete)]
        seconds = max(seconds, clock - (state.first[rank] if by_span else 0.0))
    return seconds


@compiled_helper
def _reset(stages, per_stage, least, give_up_s, state):
    num_microbatches = state.forward_end.shape[1]
    for stage in range(len(state.num_forward)):
        state.num_forward[stage] = 0
        state.num_input_grad[stage] = 0
        state.num_weight_grad[stage] = 0
    for rank in range(len(state.clock)):
        state.clock[rank] = 0.0
        state.first[rank] = 0.0
        state.idle[rank] = 0.0
        state.memory[rank] = 0.0
        state.peak[rank] = 0.0
        state.slack[rank] = give_up_s - least[rank] + TINY
        state.head[rank] = num_microbatches * stages.offsets[rank]
        state.tail[rank] = num_microbatches * stages.offsets[rank]
        state.reached[rank] = per_stage * stages.offsets[rank]
        state.written[rank] = 3 * num_microbatches * stages.offsets[rank]


@compiled_helper
def _fill(rank, arrives, most, most_idle, clock, memory, stages, state, rule, complete):
    """Run the weight gradients that `rule` wants before a pass of `rank` that must find at most `most` memory in use; return
    the clock and the memory afterwards."""
    while state.head[rank] < state.tail[rank]:
        gap = arrives - clock
        if memory <= most:
            if gap <= TINY:
                break
            seconds = stages.weight_grad[state.waiting[state.head[rank]]]
            if gap < rule.share * seconds - TINY and gap <= most_idle + TINY:
                break
        stage = _next_waiting(rank, state, complete)
        clock += stages.weight_grad[stage]
        memory -= stages.held[stage]
    return clock, memory


@compiled_helper
def _next_waiting(rank, state, complete):
    """Run the weight gradient that has waited longest and return its stage."""
    stage = state.waiting[state.head[rank]]
    state.head[rank] += 1
    _write(rank, WEIGHT_GRAD, stage, state, complete)
    return stage


@compiled_helper
def _write(rank, kind, stage, state, complete):
    if len(complete.kinds) > 0:
        complete.kinds[state.written[rank]] = kind
        complete.stages[state.written[rank]] = stage
        state.written[rank] += 1


@compiled_helper
def shift(row, source, target):
    """Move the entry at `source` to `target`."""
    entry = row[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
    row[target] = entry
