"""Choice of the next work of a rank in a list schedule, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled_helper
from stagewright.schedule.list_scheduler.terms import FORWARD, INPUT_GRAD, TINY, WEIGHT_GRAD


class Clocks(NamedTuple):
    """State of a schedule: ends and counts per stage, and the last work of each rank.

    `value_at[n]` is when the input of the next forward of stage ``members[n]`` is there, infinite while unknown
    and after the last; `gradient_at` likewise. `forward_deadline` and `input_grad_deadline` are their deadlines, and
    `weight_grad_deadline` the number of the weight gradient that is next, infinite where none waits.
    """

    forward_end: Floats  # [stage, microbatch]
    input_grad_end: Floats
    num_forward: Ints
    num_input_grad: Ints
    num_weight_grad: Ints
    place: Ints  # of each stage among the members
    value_at: Floats
    gradient_at: Floats
    forward_deadline: Floats
    input_grad_deadline: Floats
    weight_grad_deadline: Floats
    free: Floats  # [rank] when its last work ends
    memory: Floats
    last_pass: Ints
    last_stage: Ints
    last_start: Floats
    num_waiting: Ints  # weight gradients


class Pick(NamedTuple):
    """Candidates for the next work of a rank: one member per kind, or -1."""

    forward: int
    input_grad: int
    held_forward: int
    held_input_grad: int


@compiled_helper
def pick_ready(rank, now, stages, clocks, window):
    """Return the most urgent forward and input gradient that are ready."""
    low, high = stages.offsets[rank], stages.offsets[rank + 1]
    input_grad = _most_urgent(low, high, now, clocks.gradient_at, clocks.input_grad_deadline)
    forward = _most_urgent(low, high, now, clocks.value_at, clocks.forward_deadline)
    if forward >= 0 and not _is_admitted(rank, stages.members[forward], stages, clocks, window):
        forward = _admitted_forward(rank, now, stages, clocks, window)
    return Pick(forward, input_grad, -1, -1)


@compiled_helper
def _most_urgent(low, high, now, at, deadlines):
    """Return the member from `low` to `high` with the earliest deadline among those whose input has arrived; -1 for none.

    There are no branches on readiness because half of them would be mispredicted.
    """
    best, first = -1, np.inf
    for member in range(low, high):
        takes = (at[member] <= now) & (deadlines[member] < first)
        best = member if takes else best
        first = deadlines[member] if takes else first
        if first == -np.inf:  # never, but without an exit the compiler makes vectors of these few members
            break
    return best


@compiled_helper
def _admitted_forward(rank, now, stages, clocks, window):
    """Return the most urgent forward that is ready and fits the memory."""
    best = -1
    for member in range(stages.offsets[rank], stages.offsets[rank + 1]):
        is_ready = clocks.value_at[member] <= now and _is_before(member, best, clocks.forward_deadline)
        if is_ready and _is_admitted(rank, stages.members[member], stages, clocks, window):
            best = member
    return best


@compiled_helper
def pick_hidden(rank, now, stages, clocks, window):
    """Return the same as `pick_ready`, with work that AdaPtis' rule holds back separately."""
    forward, input_grad, held_forward, held_input_grad = -1, -1, -1, -1
    for member in range(stages.offsets[rank], stages.offsets[rank + 1]):
        stage = stages.members[member]
        if clocks.gradient_at[member] <= now:
            if _is_unhidden(INPUT_GRAD, stage, rank, stages, clocks):
                if _is_before(member, held_input_grad, clocks.input_grad_deadline):
                    held_input_grad = member
            elif _is_before(member, input_grad, clocks.input_grad_deadline):
                input_grad = member
        if clocks.value_at[member] <= now and _is_admitted(rank, stage, stages, clocks, window):
            if _is_unhidden(FORWARD, stage, rank, stages, clocks):
                if _is_before(member, held_forward, clocks.forward_deadline):
                    held_forward = member
            elif _is_before(member, forward, clocks.forward_deadline):
                forward = member
    return Pick(forward, input_grad, held_forward, held_input_grad)


@compiled_helper
def _is_before(member, other, deadlines):
    """Whether `member` is more urgent than `other`; none (-1) is least urgent."""
    return member >= 0 and (other < 0 or deadlines[member] < deadlines[other])


@compiled_helper
def later_choice(rank, now, stages, clocks, window):
    """Return the time of the next choice of `rank`."""
    later = np.inf
    for member in range(stages.offsets[rank], stages.offsets[rank + 1]):
        at = clocks.gradient_at[member]
        if now < at < later:
            later = at
        at = clocks.value_at[member]
        if now < at < later and _is_admitted(rank, stages.members[member], stages, clocks, window):
            later = at
    return later


@compiled_helper
def choose(rank, now, pick, later, stages, clocks, rule):
    """Return the pass and member that `rank` starts now; member -1 for none."""
    if clocks.num_waiting[rank] > rule.max_deferred:
        return WEIGHT_GRAD, _oldest_weight_grad(rank, stages, clocks)
    if pick.forward >= 0 or pick.input_grad >= 0:
        return _first(rank, pick.forward, pick.input_grad, clocks, rule)
    is_held = pick.held_forward >= 0 or pick.held_input_grad >= 0
    if clocks.num_waiting[rank] > 0:
        member = _oldest_weight_grad(rank, stages, clocks)
        wanted = rule.share * stages.weight_grad[stages.members[member]]
        if is_held or later - now >= wanted:
            return WEIGHT_GRAD, member
    return _first(rank, pick.held_forward, pick.held_input_grad, clocks, rule)


@compiled_helper
def _first(rank, forward, input_grad, clocks, rule):
    """Return which of a forward and an input gradient goes first; either may be missing."""
    if forward < 0:
        return INPUT_GRAD, input_grad
    if input_grad < 0:
        return FORWARD, forward
    if rule.deadline_scale > 0.0:
        is_forward = clocks.forward_deadline[forward] < clocks.input_grad_deadline[input_grad]
    else:
        is_forward = rule.forward_next and clocks.last_pass[rank] == INPUT_GRAD
    if is_forward:
        return FORWARD, forward
    return INPUT_GRAD, input_grad


@compiled_helper
def _is_admitted(rank, stage, stages, clocks, window):
    if clocks.num_forward[stage] - clocks.num_input_grad[stage] >= window[stage]:
        return False
    needed = clocks.memory[rank] + stages.saved[stage] + stages.saved_later[stage]
    return needed <= stages.limit[rank] * (1.0 + TINY)


@compiled_helper
def _is_unhidden(kind, stage, rank, stages, clocks):
    """Whether the input comes from the last work of another rank, and arrived after this rank's last work began."""
    producer = stage - 1 if kind == FORWARD else stage + 1
    if producer < 0 or producer >= len(stages.rank):
        return False
    other = stages.rank[producer]
    if other == rank or clocks.last_pass[other] != kind or clocks.last_stage[other] != producer:
        return False
    if kind == FORWARD:
        is_last = clocks.num_forward[producer] == clocks.num_forward[stage] + 1
    else:
        is_last = clocks.num_input_grad[producer] == clocks.num_input_grad[stage] + 1
    return is_last and clocks.free[other] > clocks.last_start[rank]


@compiled_helper
def _oldest_weight_grad(rank, stages, clocks):
    deadlines = clocks.weight_grad_deadline
    return _most_urgent(stages.offsets[rank], stages.offsets[rank + 1], np.inf, deadlines, deadlines)
