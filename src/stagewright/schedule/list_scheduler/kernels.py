"""Compiled list scheduling: thousands of schedules a second for one layout of layers on ranks."""

from __future__ import annotations

import numba
import numpy as np

from stagewright.schedule.list_scheduler.arrivals import arrival, helper, rank_seconds
from stagewright.schedule.list_scheduler.choosing import (
    Clocks,
    choose,
    later_choice,
    pick_hidden,
    pick_ready,
)
from stagewright.schedule.list_scheduler.terms import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Order


@numba.njit(cache=True, nogil=True)
def list_schedule(stages, num_microbatches, rule, window, due, give_up_s):
    """Makespan and order; infinite once no schedule that goes on from here can end before `give_up_s`."""
    slack = give_up_s - num_microbatches * rank_seconds(stages)
    return list_within(stages, num_microbatches, rule, window, due, slack)


@numba.njit(cache=True, nogil=True)
def list_within(stages, num_microbatches, rule, window, due, slack):
    """As `list_schedule`, infinite once a rank has been idle for longer than its `slack`, which is used up.

    A forward is only admitted when its rank has room for the forwards of the same microbatch on its later
    stages as well. So the schedule never gets stuck as long as every rank can hold one microbatch: of all
    forwards that wait for memory take the deepest. Whatever its rank holds was admitted before it with room
    for it, and everything deeper has been through.
    """
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    order = Order(
        np.empty(3 * num_stages * num_microbatches, np.int8),
        np.empty(3 * num_stages * num_microbatches, np.int16),
    )
    if slack.min() < 0.0:
        return np.inf, order
    clocks = _clocks(stages, num_microbatches, due)
    place = 3 * num_microbatches * stages.offsets
    wake, first = _wake_times(num_ranks)
    _wake(stages.rank[0], 0.0, wake, first)
    left = 3 * num_stages * num_microbatches
    backwards_begun = False
    while left > 0:
        rank = first[1]
        now = wake[rank]
        if now == np.inf:
            return np.inf, order
        if rule.holds_back and backwards_begun and clocks.free[rank] == now:
            pick = pick_hidden(rank, now, stages, clocks, window)
        else:
            pick = pick_ready(rank, now, stages, clocks, window)
        later = np.inf
        if pick.forward < 0 and pick.input_grad < 0:
            later = later_choice(rank, now, stages, clocks, window)
        kind, member = choose(rank, now, pick, later, stages, clocks, rule)
        if member < 0:
            _wake(rank, later, wake, first)
            continue
        slack[rank] -= now - clocks.free[rank]
        if slack[rank] < 0.0:
            return np.inf, order
        backwards_begun |= kind == INPUT_GRAD
        stage = stages.members[member]
        if kind != WEIGHT_GRAD or rule.forward_next < 2:
            clocks.last_pass[rank] = kind
        clocks.last_stage[rank] = stage
        clocks.last_start[rank] = now
        order.passes[place[rank]] = kind
        order.stages[place[rank]] = stage
        place[rank] += 1
        left -= 1
        user, at = -1, np.inf
        if kind == FORWARD:
            user, at = _run_forward(rank, member, stage, now, stages, clocks, due)
        elif kind == INPUT_GRAD:
            user, at = _run_input_grad(rank, member, stage, now, stages, clocks, due)
        else:
            number = clocks.num_weight_grad[stage] + 1
            clocks.num_weight_grad[stage] = number
            clocks.weight_grad_due[member] = number if number < clocks.num_input_grad[stage] else np.inf
            clocks.num_waiting[rank] -= 1
            clocks.memory[rank] -= stages.held[stage]
            clocks.free[rank] = now + stages.weight_grad[stage]
        _wake(rank, clocks.free[rank], wake, first)
        if user >= 0 and at < wake[user]:
            _wake(user, max(clocks.free[user], at), wake, first)
    return clocks.free.max(), order


@numba.njit(cache=True, nogil=True)
def _wake_times(num_ranks):
    """When each rank next has a choice, and a tournament: node 1 holds the rank that is first."""
    size = 1
    while size < num_ranks:
        size *= 2
    first = np.zeros(2 * size, np.int64)
    for rank in range(size):
        first[size + rank] = rank
    for node in range(size - 1, 0, -1):
        first[node] = first[2 * node]
    return np.full(size, np.inf), first


@helper
def _wake(rank, at, wake, first):
    """Let `rank` choose at `at`; of two ranks at one time the lower is first."""
    wake[rank] = at
    node = len(wake) + rank
    while node > 1:
        other = first[node ^ 1]
        is_later = at > wake[other] or (at == wake[other] and rank > other)
        rank, at = (other, wake[other]) if is_later else (rank, at)
        node >>= 1
        first[node] = rank


@numba.njit(cache=True, nogil=True)
def _clocks(stages, num_microbatches, due):
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    place = np.empty(num_stages, np.int64)
    place[stages.members] = np.arange(num_stages)
    value_at = np.full(num_stages, np.inf)
    value_at[place[0]] = 0.0
    return Clocks(
        np.empty((num_stages, num_microbatches)), np.empty((num_stages, num_microbatches)),
        np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64),
        place, value_at, np.full(num_stages, np.inf),
        due.forward[stages.members], due.input_grad[stages.members], np.full(num_stages, np.inf),
        np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, -1), np.full(num_ranks, -1),
        np.full(num_ranks, -1.0), np.zeros(num_ranks, np.int64),
    )  # fmt: skip


@helper
def _run_forward(rank, member, stage, now, stages, clocks, due):
    """Run the next forward of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_forward[stage]
    end = now + stages.forward[stage]
    clocks.forward_end[stage, m] = end
    clocks.num_forward[stage] = m + 1
    clocks.forward_due[member] += due.forward_pace[stage]
    clocks.memory[rank] += stages.saved[stage]
    clocks.free[rank] = end
    clocks.value_at[member] = arrival(FORWARD, stage, stages, clocks)
    if stage + 1 == len(stages.rank):
        clocks.gradient_at[member] = arrival(INPUT_GRAD, stage, stages, clocks)
    elif clocks.num_forward[stage + 1] == m:
        at = arrival(FORWARD, stage + 1, stages, clocks)
        clocks.value_at[clocks.place[stage + 1]] = at
        return stages.rank[stage + 1], at
    return -1, np.inf


@helper
def _run_input_grad(rank, member, stage, now, stages, clocks, due):
    """Run the next input gradient of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_input_grad[stage]
    end = now + stages.input_grad[stage]
    clocks.input_grad_end[stage, m] = end
    clocks.num_input_grad[stage] = m + 1
    clocks.input_grad_due[member] += due.input_grad_pace[stage]
    clocks.num_waiting[rank] += 1
    if clocks.weight_grad_due[member] == np.inf:
        clocks.weight_grad_due[member] = clocks.num_weight_grad[stage]
    clocks.memory[rank] -= stages.saved[stage] - stages.held[stage]
    clocks.free[rank] = end
    clocks.gradient_at[member] = arrival(INPUT_GRAD, stage, stages, clocks)
    if stage > 0 and clocks.num_input_grad[stage - 1] == m:
        at = arrival(INPUT_GRAD, stage - 1, stages, clocks)
        clocks.gradient_at[clocks.place[stage - 1]] = at
        return stages.rank[stage - 1], at
    return -1, np.inf
