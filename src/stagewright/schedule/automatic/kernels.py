"""Compiled loops of the automatic scheduler: time an order, build one greedily, improve one by small moves.

An order lists, per rank, the forwards and input gradients as two arrays: the pass (`FORWARD` or
`INPUT_GRAD`) and the stage. Microbatches run in increasing order in every stage. Weight gradients are
filled in while an order is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)
TINY = 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Orders = NDArray[np.int16]


class Costs(NamedTuple):
    """Seconds and memory per stage; `limit` is the memory per rank."""

    rank: Ints
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    value_s: Floats  # transfer of a value to this stage
    gradient_s: Floats  # transfer of a gradient to this stage
    saved: Floats  # kept from forward to input gradient
    held: Floats  # kept from input gradient to weight gradient
    limit: Floats


class FillRule(NamedTuple):
    """When a weight gradient runs before the next forward or input gradient, beside when memory must be
    freed.

    When more than `backlog` wait; when the rank would otherwise idle for at least `share` of its time; and,
    if `levels`, when idling would make this rank the one that has idled longest.
    """

    backlog: int
    share: float
    levels: bool


class State(NamedTuple):
    """Where a timing stands."""

    value_at: Floats  # [stage, microbatch] end of the forward, negative while unknown
    gradient_at: Floats
    num_forward: Ints
    num_input_grad: Ints
    clock: Floats
    first: Floats
    idle: Floats
    memory: Floats
    waiting: Orders  # [rank, :] stages of the weight gradients in order of their input gradients
    head: Ints
    tail: Ints


class Out(NamedTuple):
    """The complete order, with weight gradients; rows are ranks."""

    passes: Orders
    stages: Orders
    length: Ints


@numba.njit(cache=True)
def time_order(passes, stages, num_microbatches, costs, rule):
    """Longest span of a rank and makespan, infinite if the order cannot run, and the complete order."""
    num_ranks, length = passes.shape
    state = _start(num_ranks, length, len(costs.rank), num_microbatches)
    out = _empty_out(num_ranks, length + length // 2)
    reached = np.zeros(num_ranks, np.int64)
    longest_idle = 0.0
    moved = True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while reached[rank] < length:
                kind = passes[rank, reached[rank]]
                stage = stages[rank, reached[rank]]
                if stage < 0:
                    break
                arrival = _arrival(kind, stage, state, costs)
                if arrival < 0.0:
                    break
                _fill(rank, kind, stage, arrival, longest_idle, state, costs, rule, out)
                if kind == FORWARD and state.memory[rank] + costs.saved[stage] > costs.limit[rank] + TINY:
                    return np.inf, np.inf, out
                longest_idle = max(longest_idle, _run(rank, kind, stage, arrival, state, costs, out))
                while state.tail[rank] - state.head[rank] > rule.backlog:
                    _run_weight_grad(rank, state, costs, out)
                reached[rank] += 1
                moved = True
    span = 0.0
    for rank in range(num_ranks):
        if reached[rank] < length and stages[rank, reached[rank]] >= 0:
            return np.inf, np.inf, out
        while state.head[rank] < state.tail[rank]:
            _run_weight_grad(rank, state, costs, out)
        span = max(span, state.clock[rank] - state.first[rank])
    return span, state.clock.max(), out


@numba.njit(cache=True)
def _start(num_ranks, length, num_stages, num_microbatches):
    return State(
        np.full((num_stages, num_microbatches), -1.0),
        np.full((num_stages, num_microbatches), -1.0),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_ranks),
        np.full(num_ranks, -1.0),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.empty((num_ranks, length), np.int16),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
    )


@numba.njit(cache=True)
def _empty_out(num_ranks, length):
    return Out(
        np.full((num_ranks, length), -1, np.int16),
        np.full((num_ranks, length), -1, np.int16),
        np.zeros(num_ranks, np.int64),
    )


@numba.njit(cache=True)
def _arrival(kind, stage, state, costs):
    """When the next forward or input gradient of `stage` has its inputs; negative if unknown."""
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        sent = state.value_at[stage - 1, state.num_forward[stage]]
        return sent + costs.value_s[stage] if sent >= 0.0 else -1.0
    m = state.num_input_grad[stage]
    if m >= state.num_forward[stage]:
        return -1.0
    if stage == len(costs.rank) - 1:
        return state.value_at[stage, m]
    sent = state.gradient_at[stage + 1, m]
    return sent + costs.gradient_s[stage] if sent >= 0.0 else -1.0


@numba.njit(cache=True)
def _fill(rank, kind, stage, arrival, longest_idle, state, costs, rule, out):
    """Run the weight gradients that `rule` wants before the next pass of `rank`."""
    while state.head[rank] < state.tail[rank]:
        gap = arrival - state.clock[rank]
        seconds = costs.weight_grad[state.waiting[rank, state.head[rank]]]
        is_full = kind == FORWARD and state.memory[rank] + costs.saved[stage] > costs.limit[rank] + TINY
        fits = gap > TINY and gap >= rule.share * seconds - TINY
        is_worst = rule.levels and gap > TINY and state.idle[rank] + gap > longest_idle + TINY
        if not (is_full or fits or is_worst):
            return
        _run_weight_grad(rank, state, costs, out)


@numba.njit(cache=True)
def _run(rank, kind, stage, arrival, state, costs, out):
    """Run a forward or input gradient; return how long its rank has idled between its passes so far."""
    if state.first[rank] < 0.0:
        state.clock[rank] = max(arrival, state.clock[rank])
        state.first[rank] = state.clock[rank]
    state.idle[rank] += max(0.0, arrival - state.clock[rank])
    begin = max(arrival, state.clock[rank])
    if kind == FORWARD:
        state.clock[rank] = begin + costs.forward[stage]
        state.value_at[stage, state.num_forward[stage]] = state.clock[rank]
        state.num_forward[stage] += 1
        state.memory[rank] += costs.saved[stage]
    else:
        state.clock[rank] = begin + costs.input_grad[stage]
        state.gradient_at[stage, state.num_input_grad[stage]] = state.clock[rank]
        state.num_input_grad[stage] += 1
        state.memory[rank] -= costs.saved[stage] - costs.held[stage]
        state.waiting[rank, state.tail[rank]] = stage
        state.tail[rank] += 1
    _append(rank, kind, stage, out)
    return state.idle[rank]


@numba.njit(cache=True)
def _run_weight_grad(rank, state, costs, out):
    stage = state.waiting[rank, state.head[rank]]
    state.head[rank] += 1
    state.clock[rank] += costs.weight_grad[stage]
    state.memory[rank] -= costs.held[stage]
    _append(rank, WEIGHT_GRAD, stage, out)


@numba.njit(cache=True)
def _append(rank, kind, stage, out):
    out.passes[rank, out.length[rank]] = kind
    out.stages[rank, out.length[rank]] = stage
    out.length[rank] += 1


@numba.njit(cache=True)
def build_greedily(num_ranks, num_microbatches, costs, window, forward_after_backward, deep_forwards_first):
    """An order built in time: of the passes that could start first, an input gradient before a forward.

    `window` bounds per stage the forwards without input gradient. With `forward_after_backward` a rank that
    has just run an input gradient takes a forward first; `deep_forwards_first` chooses among forwards ready
    at one time. A forward leaves room for the forwards of the later stages of its rank, so that the oldest
    microbatch can always go on. Weight gradients run as soon as a rank idles or is out of memory.
    """
    num_stages = len(costs.rank)
    length = 2 * num_stages * num_microbatches
    state = _start(num_ranks, length, num_stages, num_microbatches)
    out = _empty_out(num_ranks, length)
    scratch = _empty_out(num_ranks, length)
    room = _room_for_later_stages(costs)
    last = np.full(num_ranks, FORWARD)
    while True:
        best, best_rank, best_kind, best_stage = np.inf, -1, -1, -1
        for rank in range(num_ranks):
            begin, kind, stage = _next_pass(
                rank,
                num_microbatches,
                last[rank],
                state,
                costs,
                window,
                room,
                forward_after_backward,
                deep_forwards_first,
            )
            if state.head[rank] < state.tail[rank] and begin > state.clock[rank] + TINY:
                begin, kind = state.clock[rank], WEIGHT_GRAD
            if begin < best - TINY:
                best, best_rank, best_kind, best_stage = begin, rank, kind, stage
        if best_rank < 0:
            return out
        if best_kind == WEIGHT_GRAD:
            scratch.length[best_rank] = 0
            _run_weight_grad(best_rank, state, costs, scratch)
        else:
            _run(best_rank, best_kind, best_stage, best, state, costs, out)
            last[best_rank] = best_kind


@numba.njit(cache=True)
def _next_pass(rank, num_microbatches, last, state, costs, window, room, forward_after_backward, deep_first):
    """The forward or input gradient that `rank` can start first: when, which pass, which stage."""
    forward_at, forward_stage = np.inf, -1
    backward_at, backward_stage = np.inf, -1
    for stage in range(len(costs.rank)):
        if costs.rank[stage] != rank:
            continue
        in_flight = state.num_forward[stage] - state.num_input_grad[stage]
        if in_flight > 0:
            at = _arrival(INPUT_GRAD, stage, state, costs)
            at = max(at, state.clock[rank]) if at >= 0.0 else np.inf
            if at <= backward_at and at < np.inf:
                backward_at, backward_stage = at, stage
        fits = state.memory[rank] + costs.saved[stage] + room[stage] <= costs.limit[rank] + TINY
        if state.num_forward[stage] < num_microbatches and in_flight < window[stage] and fits:
            at = _arrival(FORWARD, stage, state, costs)
            at = max(at, state.clock[rank]) if at >= 0.0 else np.inf
            if at < forward_at or (at == forward_at and deep_first and at < np.inf):
                forward_at, forward_stage = at, stage
    tie_to_forward = forward_after_backward and last == INPUT_GRAD
    if forward_at < backward_at - TINY or (forward_at <= backward_at + TINY and tie_to_forward):
        return forward_at, FORWARD, forward_stage
    return backward_at, INPUT_GRAD, backward_stage


@numba.njit(cache=True)
def _room_for_later_stages(costs):
    room = np.zeros(len(costs.rank))
    for stage in range(len(costs.rank)):
        for later in range(stage + 1, len(costs.rank)):
            if costs.rank[later] == costs.rank[stage]:
                room[stage] += costs.saved[later]
    return room


@numba.njit(cache=True)
def improve(passes, stages, num_microbatches, costs, rule, by_span, num_moves, seed, good_enough):
    """Move single passes by a few places wherever that does not lengthen the order, which changes in place.

    Returns the longest span of a rank if `by_span`, else the makespan; stops early at `good_enough`.
    """
    np.random.seed(seed)
    num_ranks, length = passes.shape
    span, makespan, _ = time_order(passes, stages, num_microbatches, costs, rule)
    best = span if by_span else makespan
    for _ in range(num_moves):
        if best <= good_enough:
            break
        rank = np.random.randint(num_ranks)
        source = np.random.randint(length)
        distance = 1 + int(6 * np.random.random() ** 2)
        target = source + distance if np.random.random() < 0.5 else source - distance
        target = min(max(target, 0), length - 1)
        if stages[rank, source] < 0 or stages[rank, target] < 0 or source == target:
            continue
        _move(passes[rank], source, target)
        _move(stages[rank], source, target)
        span, makespan, _ = time_order(passes, stages, num_microbatches, costs, rule)
        length_now = span if by_span else makespan
        if length_now <= best + TINY:
            best = min(best, length_now)
        else:
            _move(passes[rank], target, source)
            _move(stages[rank], target, source)
    return best


@numba.njit(cache=True)
def _move(row, source, target):
    """Take the entry at `source` out and put it in at `target`."""
    entry = row[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
    row[target] = entry
