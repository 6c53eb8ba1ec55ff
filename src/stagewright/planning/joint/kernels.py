"""Compiled list scheduling: thousands of schedules a second for one layout of layers on ranks.

Microbatches pass every stage in order. That loses nothing: microbatches are alike, so the k-th start of a
pass may always be given to microbatch k.
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


class Stages(NamedTuple):
    """What the stages of a layout cost, in seconds and bytes.

    `hop[s]` is the transfer between stages ``s - 1`` and ``s``; `room[s]` what the later stages of its rank
    save together; `limit` the bytes per rank for saved activations. Rank `r` holds the stages
    ``members[offsets[r]:offsets[r + 1]]``.
    """

    rank: Ints
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    hop: Floats
    saved: Floats
    held: Floats
    room: Floats
    limit: Floats
    members: Ints
    offsets: Ints


class Rule(NamedTuple):
    """How a rank chooses among work that is ready.

    Input gradients go first, or with `forward_next` a forward right after an input gradient. `oldest` takes
    input gradients by microbatch, else the deepest stage first; `deep_forwards` takes the deepest forward,
    else the oldest microbatch. `depth` scales how many microbatches a stage may hold; see `window`. A weight
    gradient runs when nothing else is ready and at least `share` of it fits before other work arrives, or
    when more than `backlog` wait. `holds_back` is AdaPtis' rule against transfers that could not hide.
    """

    forward_next: bool
    oldest: bool
    deep_forwards: bool
    depth: float
    share: float
    backlog: int
    holds_back: bool


class Order(NamedTuple):
    """Passes and stages in the order each rank runs them; rank `r` from ``3 M offsets[r]`` on."""

    passes: NDArray[np.int8]
    stages: NDArray[np.int16]


class Clocks(NamedTuple):
    """Where a schedule stands: ends and counts per stage, and per rank what it last did."""

    forward_end: Floats  # [stage, microbatch]
    input_grad_end: Floats
    num_forward: Ints
    num_input_grad: Ints
    num_weight_grad: Ints
    free: Floats  # [rank] when its last work ends
    memory: Floats
    last_pass: Ints
    last_stage: Ints
    last_start: Floats
    num_waiting: Ints  # weight gradients


# Helpers without reference counting are inlined well; it would double the time of the loop.
_helper = numba.njit(cache=True, _nrt=False)  # pyright: ignore[reportCallIssue]: no public option


@numba.njit(cache=True, nogil=True)
def list_schedule(stages, num_microbatches, rule, window, give_up_s):
    """Makespan and order; infinite once no schedule that goes on from here can end before `give_up_s`.

    A forward is only admitted when its rank has room for the forwards of the same microbatch on its later
    stages as well. So the schedule never gets stuck as long as every rank can hold one microbatch: of all
    forwards that wait for memory take the deepest. Whatever its rank holds was admitted before it with room
    for it, and everything deeper has been through.
    """
    num_stages, num_ranks = len(stages.rank), len(stages.offsets) - 1
    clocks = _clocks(num_stages, num_ranks, num_microbatches)
    order = Order(
        np.empty(3 * num_stages * num_microbatches, np.int8),
        np.empty(3 * num_stages * num_microbatches, np.int16),
    )
    place = 3 * num_microbatches * stages.offsets
    wake = np.full(num_ranks, np.inf)
    wake[stages.rank[0]] = 0.0
    slack = _slack(stages, num_microbatches, give_up_s)
    left = 3 * num_stages * num_microbatches
    backwards_begun = False
    while left > 0:
        rank = 0
        for other in range(1, num_ranks):
            if wake[other] < wake[rank]:
                rank = other
        now = wake[rank]
        if now == np.inf:
            return np.inf, order
        kind, stage, later = _choose(
            rank, now, num_microbatches, stages, clocks, rule, window, backwards_begun
        )
        if stage < 0:
            wake[rank] = later
            continue
        slack[rank] -= now - clocks.free[rank]
        if slack[rank] < 0.0:
            return np.inf, order
        backwards_begun |= kind == INPUT_GRAD
        end = _run(rank, now, kind, stage, stages, clocks)
        order.passes[place[rank]] = kind
        order.stages[place[rank]] = stage
        place[rank] += 1
        left -= 1
        wake[rank] = end
        _wake_user(kind, stage, end, stages, clocks, wake)
    return clocks.free.max(), order


@numba.njit(cache=True, nogil=True)
def _clocks(num_stages, num_ranks, num_microbatches):
    return Clocks(
        np.empty((num_stages, num_microbatches)), np.empty((num_stages, num_microbatches)),
        np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64),
        np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, -1), np.full(num_ranks, -1),
        np.full(num_ranks, -1.0), np.zeros(num_ranks, np.int64),
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _slack(stages, num_microbatches, give_up_s):
    """How long each rank may idle in all."""
    slack = np.full(len(stages.offsets) - 1, give_up_s)
    for stage in range(len(stages.rank)):
        seconds = stages.forward[stage] + stages.input_grad[stage] + stages.weight_grad[stage]
        slack[stages.rank[stage]] -= num_microbatches * seconds
    return slack


@_helper
def _value_at(stage, m, stages, clocks):
    """When stage `stage` has the input of microbatch `m`; infinite while unknown."""
    if stage == 0:
        return 0.0
    if m >= clocks.num_forward[stage - 1]:
        return np.inf
    return clocks.forward_end[stage - 1, m] + stages.hop[stage]


@_helper
def _gradient_at(stage, m, stages, clocks):
    """When stage `stage` can compute the input gradient of microbatch `m`; infinite while unknown."""
    if m >= clocks.num_forward[stage]:
        return np.inf
    if stage == len(stages.rank) - 1:
        return clocks.forward_end[stage, m]
    if m >= clocks.num_input_grad[stage + 1]:
        return np.inf
    return clocks.input_grad_end[stage + 1, m] + stages.hop[stage + 1]


@_helper
def _choose(rank, now, num_microbatches, stages, clocks, rule, window, backwards_begun):
    """The pass and stage that `rank` starts now, or stage -1 and when it next has a choice."""
    forward, input_grad = -1, -1
    held_forward, held_input_grad = -1, -1
    later = np.inf
    tests = rule.holds_back and backwards_begun and clocks.free[rank] == now
    for n in range(stages.offsets[rank], stages.offsets[rank + 1]):
        stage = stages.members[n]
        m = clocks.num_input_grad[stage]
        if m < num_microbatches:
            at = _gradient_at(stage, m, stages, clocks)
            if at > now:
                later = min(later, at)
            elif tests and _is_unhidden(INPUT_GRAD, stage, rank, stages, clocks):
                if _is_better_input_grad(stage, held_input_grad, clocks, rule):
                    held_input_grad = stage
            elif _is_better_input_grad(stage, input_grad, clocks, rule):
                input_grad = stage
        m = clocks.num_forward[stage]
        if m < num_microbatches and _is_admitted(rank, stage, stages, clocks, window):
            at = _value_at(stage, m, stages, clocks)
            if at > now:
                later = min(later, at)
            elif tests and _is_unhidden(FORWARD, stage, rank, stages, clocks):
                if _is_better_forward(stage, held_forward, clocks, rule):
                    held_forward = stage
            elif _is_better_forward(stage, forward, clocks, rule):
                forward = stage
    forward_first = rule.forward_next and clocks.last_pass[rank] == INPUT_GRAD
    if clocks.num_waiting[rank] > rule.backlog:
        return WEIGHT_GRAD, _oldest_weight_grad(rank, stages, clocks), later
    if forward >= 0 and (forward_first or input_grad < 0):
        return FORWARD, forward, later
    if input_grad >= 0:
        return INPUT_GRAD, input_grad, later
    if clocks.num_waiting[rank] > 0:
        stage = _oldest_weight_grad(rank, stages, clocks)
        if held_forward < 0 and held_input_grad < 0:
            fits = later - now >= rule.share * stages.weight_grad[stage]
        else:
            fits = True
        if fits:
            return WEIGHT_GRAD, stage, later
    if held_forward >= 0 and (forward_first or held_input_grad < 0):
        return FORWARD, held_forward, later
    return INPUT_GRAD, held_input_grad, later


@_helper
def _is_admitted(rank, stage, stages, clocks, window):
    if clocks.num_forward[stage] - clocks.num_input_grad[stage] >= window[stage]:
        return False
    needed = clocks.memory[rank] + stages.saved[stage] + stages.room[stage]
    return needed <= stages.limit[rank] * (1.0 + TINY)


@_helper
def _is_better_input_grad(stage, other, clocks, rule):
    """Stages come in increasing order, so that of two equals the deeper comes last."""
    if other < 0 or not rule.oldest:
        return True
    return clocks.num_input_grad[stage] <= clocks.num_input_grad[other]


@_helper
def _is_better_forward(stage, other, clocks, rule):
    if other < 0 or rule.deep_forwards:
        return True
    return clocks.num_forward[stage] < clocks.num_forward[other]


@_helper
def _is_unhidden(kind, stage, rank, stages, clocks):
    """Whether the input comes from what another rank started last, after this rank's last work began."""
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


@_helper
def _oldest_weight_grad(rank, stages, clocks):
    best = -1
    for n in range(stages.offsets[rank], stages.offsets[rank + 1]):
        stage = stages.members[n]
        if clocks.num_weight_grad[stage] < clocks.num_input_grad[stage] and (
            best < 0 or clocks.num_weight_grad[stage] < clocks.num_weight_grad[best]
        ):
            best = stage
    return best


@_helper
def _run(rank, now, kind, stage, stages, clocks):
    """Run the next `kind` of `stage`; return when it ends."""
    if kind == FORWARD:
        end = now + stages.forward[stage]
        clocks.forward_end[stage, clocks.num_forward[stage]] = end
        clocks.num_forward[stage] += 1
        clocks.memory[rank] += stages.saved[stage]
    elif kind == INPUT_GRAD:
        end = now + stages.input_grad[stage]
        clocks.input_grad_end[stage, clocks.num_input_grad[stage]] = end
        clocks.num_input_grad[stage] += 1
        clocks.num_waiting[rank] += 1
        clocks.memory[rank] -= stages.saved[stage] - stages.held[stage]
    else:
        end = now + stages.weight_grad[stage]
        clocks.num_weight_grad[stage] += 1
        clocks.num_waiting[rank] -= 1
        clocks.memory[rank] -= stages.held[stage]
    clocks.free[rank] = end
    clocks.last_pass[rank] = kind
    clocks.last_stage[rank] = stage
    clocks.last_start[rank] = now
    return end


@_helper
def _wake_user(kind, stage, end, stages, clocks, wake):
    """Let the rank that uses the result look again when it arrives."""
    if kind == WEIGHT_GRAD:
        return
    user = stage + 1 if kind == FORWARD else stage - 1
    if user < 0 or user >= len(stages.rank):
        return
    hop = stages.hop[user] if kind == FORWARD else stages.hop[stage]
    rank = stages.rank[user]
    wake[rank] = min(wake[rank], max(clocks.free[rank], end + hop))
