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

    `start[s]` is the first layer of stage `s`, `hop[s]` the transfer between stages ``s - 1`` and ``s``;
    `room[s]` what the later stages of its rank save together; `limit` the bytes per rank for saved
    activations. Rank `r` holds the stages ``members[offsets[r]:offsets[r + 1]]``.
    """

    start: Ints
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

    With a positive `stretch` all this gives way to due dates: see `due_dates`.
    """

    forward_next: bool
    oldest: bool
    deep_forwards: bool
    depth: float
    share: float
    backlog: int
    holds_back: bool
    stretch: float


class Due(NamedTuple):
    """When the passes of microbatch 0 should run at each stage, and by how much later each further one;
    `cycle` is the seconds of the busiest rank."""

    forward: Floats
    input_grad: Floats
    forward_pace: Floats
    input_grad_pace: Floats
    cycle: float


class Order(NamedTuple):
    """Passes and stages in the order each rank runs them; rank `r` from ``3 M offsets[r]`` on."""

    passes: NDArray[np.int8]
    stages: NDArray[np.int16]


class Clocks(NamedTuple):
    """Where a schedule stands: ends and counts per stage, and per rank what it last did.

    `value_at[n]` is when the input of the next forward of stage ``members[n]`` is there, infinite while unknown
    and after the last; `gradient_at` likewise. `forward_due` and `input_grad_due` are its due dates.
    """

    forward_end: Floats  # [stage, microbatch]
    input_grad_end: Floats
    num_forward: Ints
    num_input_grad: Ints
    num_weight_grad: Ints
    place: Ints  # of each stage among the members
    value_at: Floats
    gradient_at: Floats
    forward_due: Floats
    input_grad_due: Floats
    free: Floats  # [rank] when its last work ends
    memory: Floats
    last_pass: Ints
    last_stage: Ints
    last_start: Floats
    num_waiting: Ints  # weight gradients


class Pick(NamedTuple):
    """What a rank could start: a member each, or -1. `later` is when it next has a choice."""

    forward: int
    input_grad: int
    held_forward: int
    held_input_grad: int
    later: float


# Helpers without reference counting are inlined well; it would double the time of the loop.
_helper = numba.njit(cache=True, _nrt=False)  # pyright: ignore[reportCallIssue]: no public option


@numba.njit(cache=True, nogil=True)
def list_schedule(stages, num_microbatches, rule, window, due, give_up_s):
    """Makespan and order; infinite once no schedule that goes on from here can end before `give_up_s`.

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
    slack = _slack(stages, num_microbatches, give_up_s)
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
        tests = rule.holds_back and backwards_begun and clocks.free[rank] == now
        pick = _pick(rank, now, stages, clocks, rule, window, tests)
        kind, member = _choose(rank, now, pick, stages, clocks, rule)
        if member < 0:
            _wake(rank, pick.later, wake, first)
            continue
        slack[rank] -= now - clocks.free[rank]
        if slack[rank] < 0.0:
            return np.inf, order
        backwards_begun |= kind == INPUT_GRAD
        stage = stages.members[member]
        clocks.last_pass[rank] = kind
        clocks.last_stage[rank] = stage
        clocks.last_start[rank] = now
        order.passes[place[rank]] = kind
        order.stages[place[rank]] = stage
        place[rank] += 1
        left -= 1
        user, at = -1, np.inf
        if kind == FORWARD:
            user, at = _run_forward(rank, member, stage, now, num_microbatches, stages, clocks, due)
        elif kind == INPUT_GRAD:
            user, at = _run_input_grad(rank, member, stage, now, stages, clocks, due)
        else:
            clocks.num_weight_grad[stage] += 1
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


@_helper
def _wake(rank, at, wake, first):
    """Let `rank` choose at `at`; of two ranks at one time the lower is first."""
    wake[rank] = at
    node = (len(wake) + rank) // 2
    while node > 0:
        left, right = first[2 * node], first[2 * node + 1]
        first[node] = left if wake[left] <= wake[right] else right
        node //= 2


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
        due.forward[stages.members], due.input_grad[stages.members],
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
def _pick(rank, now, stages, clocks, rule, window, tests):
    """The best forward and input gradient that are ready, apart from those that AdaPtis' rule holds back."""
    forward, input_grad, held_forward, held_input_grad = -1, -1, -1, -1
    later = np.inf
    for member in range(stages.offsets[rank], stages.offsets[rank + 1]):
        at = clocks.gradient_at[member]
        if at > now:
            later = min(later, at)
        elif tests and _is_unhidden(INPUT_GRAD, stages.members[member], rank, stages, clocks):
            if _is_better_input_grad(member, held_input_grad, stages, clocks, rule):
                held_input_grad = member
        elif _is_better_input_grad(member, input_grad, stages, clocks, rule):
            input_grad = member
        at = clocks.value_at[member]
        if at > now:
            if at < later and _is_admitted(rank, stages.members[member], stages, clocks, window):
                later = at
        elif tests and _is_unhidden(FORWARD, stages.members[member], rank, stages, clocks):
            better = _is_better_forward(member, held_forward, stages, clocks, rule)
            if better and _is_admitted(rank, stages.members[member], stages, clocks, window):
                held_forward = member
        elif _is_better_forward(member, forward, stages, clocks, rule) and _is_admitted(
            rank, stages.members[member], stages, clocks, window
        ):
            forward = member
    return Pick(forward, input_grad, held_forward, held_input_grad, later)


@_helper
def _choose(rank, now, pick, stages, clocks, rule):
    """The pass and member that `rank` starts now; member -1 for none."""
    if clocks.num_waiting[rank] > rule.backlog:
        return WEIGHT_GRAD, _oldest_weight_grad(rank, stages, clocks)
    if pick.forward >= 0 or pick.input_grad >= 0:
        return _first(rank, pick.forward, pick.input_grad, clocks, rule)
    is_held = pick.held_forward >= 0 or pick.held_input_grad >= 0
    if clocks.num_waiting[rank] > 0:
        member = _oldest_weight_grad(rank, stages, clocks)
        if is_held or pick.later - now >= rule.share * stages.weight_grad[stages.members[member]]:
            return WEIGHT_GRAD, member
    return _first(rank, pick.held_forward, pick.held_input_grad, clocks, rule)


@_helper
def _first(rank, forward, input_grad, clocks, rule):
    """Which of a forward and an input gradient goes first; either may be missing."""
    if forward < 0:
        return INPUT_GRAD, input_grad
    if input_grad < 0:
        return FORWARD, forward
    if rule.stretch > 0.0:
        is_forward = clocks.forward_due[forward] < clocks.input_grad_due[input_grad]
    else:
        is_forward = rule.forward_next and clocks.last_pass[rank] == INPUT_GRAD
    if is_forward:
        return FORWARD, forward
    return INPUT_GRAD, input_grad


@_helper
def _is_admitted(rank, stage, stages, clocks, window):
    if clocks.num_forward[stage] - clocks.num_input_grad[stage] >= window[stage]:
        return False
    needed = clocks.memory[rank] + stages.saved[stage] + stages.room[stage]
    return needed <= stages.limit[rank] * (1.0 + TINY)


@_helper
def _is_better_input_grad(member, other, stages, clocks, rule):
    """Members come in increasing order of stages, so that of two equals the deeper comes last."""
    if other < 0:
        return True
    if rule.stretch > 0.0:
        return clocks.input_grad_due[member] <= clocks.input_grad_due[other]
    if not rule.oldest:
        return True
    return clocks.num_input_grad[stages.members[member]] <= clocks.num_input_grad[stages.members[other]]


@_helper
def _is_better_forward(member, other, stages, clocks, rule):
    if other < 0:
        return True
    if rule.stretch > 0.0:
        return clocks.forward_due[member] < clocks.forward_due[other]
    if rule.deep_forwards:
        return True
    return clocks.num_forward[stages.members[member]] < clocks.num_forward[stages.members[other]]


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
    best, fewest = -1, 0
    for member in range(stages.offsets[rank], stages.offsets[rank + 1]):
        stage = stages.members[member]
        number = clocks.num_weight_grad[stage]
        if number < clocks.num_input_grad[stage] and (best < 0 or number < fewest):
            best, fewest = member, number
    return best


@_helper
def _run_forward(rank, member, stage, now, num_microbatches, stages, clocks, due):
    """Run the next forward of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_forward[stage]
    end = now + stages.forward[stage]
    clocks.forward_end[stage, m] = end
    clocks.num_forward[stage] = m + 1
    clocks.forward_due[member] += due.forward_pace[stage]
    clocks.memory[rank] += stages.saved[stage]
    clocks.free[rank] = end
    if stage > 0:
        known = m + 1 < clocks.num_forward[stage - 1]
        clocks.value_at[member] = (
            clocks.forward_end[stage - 1, m + 1] + stages.hop[stage] if known else np.inf
        )
    elif m + 1 == num_microbatches:
        clocks.value_at[member] = np.inf
    if stage + 1 == len(stages.rank):
        if clocks.num_input_grad[stage] == m:
            clocks.gradient_at[member] = end
    elif clocks.num_forward[stage + 1] == m:
        at = end + stages.hop[stage + 1]
        clocks.value_at[clocks.place[stage + 1]] = at
        return stages.rank[stage + 1], at
    return -1, np.inf


@_helper
def _run_input_grad(rank, member, stage, now, stages, clocks, due):
    """Run the next input gradient of `stage`; return the rank that it may wake, or -1, and when."""
    m = clocks.num_input_grad[stage]
    end = now + stages.input_grad[stage]
    clocks.input_grad_end[stage, m] = end
    clocks.num_input_grad[stage] = m + 1
    clocks.input_grad_due[member] += due.input_grad_pace[stage]
    clocks.num_waiting[rank] += 1
    clocks.memory[rank] -= stages.saved[stage] - stages.held[stage]
    clocks.free[rank] = end
    following = np.inf
    if stage + 1 == len(stages.rank):
        if m + 1 < clocks.num_forward[stage]:
            following = clocks.forward_end[stage, m + 1]
    elif m + 1 < clocks.num_input_grad[stage + 1]:
        following = clocks.input_grad_end[stage + 1, m + 1] + stages.hop[stage + 1]
    clocks.gradient_at[member] = following
    if stage > 0 and clocks.num_input_grad[stage - 1] == m:
        at = end + stages.hop[stage]
        clocks.gradient_at[clocks.place[stage - 1]] = at
        return stages.rank[stage - 1], at
    return -1, np.inf
