"""The list scheduler, compiled: thousands of schedules a second for one layout of layers on ranks."""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled, compiled_helper
from stagewright.schedule.list_scheduler.arrivals import arrival, rank_seconds
from stagewright.schedule.list_scheduler.choosing import (
    Clocks,
    choose,
    later_choice,
    pick_hidden,
    pick_ready,
)
from stagewright.schedule.list_scheduler.terms import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Order


@compiled
def list_schedule(stages, num_microbatches, rule, window, deadlines, give_up_s):
    """Return makespan and order; infinite once the schedule cannot end before `give_up_s`."""
    slack = give_up_s - num_microbatches * rank_seconds(stages)
    return list_within(stages, num_microbatches, rule, window, deadlines, slack)


@compiled
def list_within(stages, num_microbatches, rule, window, deadlines, slack):
    """Return the same as `list_schedule`, infinite once a rank has idled for longer than its `slack`, which is modified.

    A forward is admitted only if its rank also has memory for the forwards of the same microbatch on its later stages. So
    the schedule never gets stuck if every rank can hold one microbatch: consider the deepest of all forwards that wait for
    memory. Whatever its rank holds was admitted earlier with memory for this forward, and all deeper work has passed.
    """
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    order = Order(
        np.empty(3 * num_stages * num_microbatches, np.int8),
        np.empty(3 * num_stages * num_microbatches, np.int16),
    )
    if slack.min() < 0.0:
        return np.inf, order
    clocks = _clocks(stages, num_microbatches, deadlines)
    place = 3 * num_microbatches * stages.offsets
    wake, first = _wake_times(num_ranks)
    _wake(stages.rank[0], 0.0, wake, first)
    remaining = 3 * num_stages * num_microbatches
    backwards_begun = False
    while remaining > 0:
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
        order.kinds[place[rank]] = kind
        order.stages[place[rank]] = stage
        place[rank] += 1
        remaining -= 1
        user, at = -1, np.inf
        if kind == FORWARD:
            user, at = _run_forward(rank, member, stage, now, stages, clocks, deadlines)
        elif kind == INPUT_GRAD:
            user, at = _run_input_grad(rank, member, stage, now, stages, clocks, deadlines)
        else:
            number = clocks.num_weight_grad[stage] + 1
            clocks.num_weight_grad[stage] = number
            clocks.weight_grad_deadline[member] = number if number < clocks.num_input_grad[stage] else np.inf
            clocks.num_waiting[rank] -= 1
            clocks.memory[rank] -= stages.held[stage]
            clocks.free[rank] = now + stages.weight_grad[stage]
        _wake(rank, clocks.free[rank], wake, first)
        if user >= 0 and at < wake[user]:
            _wake(user, max(clocks.free[user], at), wake, first)
    return clocks.free.max(), order


@compiled
def _wake_times(num_ranks):
    """Return the time of each rank's next choice, and a tournament tree whose node 1 holds the earliest rank."""
    size = 1
    while size < num_ranks:
        size *= 2
    first = np.zeros(2 * size, np.int64)
    for rank in range(size):
        first[size + rank] = rank
    for node in range(size - 1, 0, -1):
        first[node] = first[2 * node]
    return np.full(size, np.inf), first


@compiled_helper
def _wake(rank, at, wake, first):
    """Set the next choice of `rank` to `at`; of two ranks at the same time the lower one comes first."""
    wake[rank] = at
    node = len(wake) + rank
    while node > 1:
        other = first[node ^ 1]
        is_later = at > wake[other] or (at == wake[other] and rank > other)
        rank, at = (other, wake[other]) if is_later else (rank, at)
        node >>= 1
        first[node] = rank


@compiled
def _clocks(stages, num_microbatches, deadlines):
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    place = np.empty(num_stages, np.int64)
    place[stages.members] = np.arange(num_stages)
    value_at = np.full(num_stages, np.inf)
    value_at[place[0]] = 0.0
    return Clocks(
        np.empty((num_stages, num_microbatches)), np.empty((num_stages, num_microbatches)),
        np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64),
        place, value_at, np.full(num_stages, np.inf),
        deadlines.forward[stages.members], deadlines.input_grad[stages.members], np.full(num_stages, np.inf),
        np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, -1), np.full(num_ranks, -1),
        np.full(num_ranks, -1.0), np.zeros(num_ranks, np.int64),
    )  # fmt: skip


@compiled_helper
def _run_forward(rank, member, stage, now, stages, clocks, deadlines):
    """Run the next forward of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_forward[stage]
    end = now + stages.forward[stage]
    clocks.forward_end[stage, m] = end
    clocks.num_forward[stage] = m + 1
    clocks.forward_deadline[member] += deadlines.forward_interval[stage]
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


@compiled_helper
def _run_input_grad(rank, member, stage, now, stages, clocks, deadlines):
    """Run the next input gradient of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_input_grad[stage]
    end = now + stages.input_grad[stage]
    clocks.input_grad_end[stage, m] = end
    clocks.num_input_grad[stage] = m + 1
    clocks.input_grad_deadline[member] += deadlines.input_grad_interval[stage]
    clocks.num_waiting[rank] += 1
    if clocks.weight_grad_deadline[member] == np.inf:
        clocks.weight_grad_deadline[member] = clocks.num_weight_grad[stage]
    clocks.memory[rank] -= stages.saved[stage] - stages.held[stage]
    clocks.free[rank] = end
    clocks.gradient_at[member] = arrival(INPUT_GRAD, stage, stages, clocks)
    if stage > 0 and clocks.num_input_grad[stage - 1] == m:
        at = arrival(INPUT_GRAD, stage - 1, stages, clocks)
        clocks.gradient_at[clocks.place[stage - 1]] = at
        return stages.rank[stage - 1], at
    return -1, np.inf
