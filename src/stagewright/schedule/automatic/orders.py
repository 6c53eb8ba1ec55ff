"""Compiled search over orders: the best of many starts, improved by small moves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.compiled import compiled, compiled_helper
from stagewright.schedule.list_scheduler.arrivals import first_arrivals
from stagewright.schedule.list_scheduler.kernels import list_within
from stagewright.schedule.list_scheduler.order_times import (
    FillRule,
    least_times,
    new_order,
    new_state,
    shift,
    time_order,
)
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of
from stagewright.schedule.list_scheduler.terms import (
    FORWARD,
    INPUT_GRAD,
    TINY,
    WEIGHT_GRAD,
    Floats,
    Ints,
    Order,
    Rule,
)

ORDER_ALONE = 1.02
"""Maximum length of a list schedule relative to a useful order: its weight gradients are then filled in again."""


class BestOrders(NamedTuple):
    """The shortest orders, the best first, each with the index of its fill rule; unused places have infinite seconds."""

    seconds: Floats
    rule: Ints
    peak: Floats  # [place, rank] memory
    kinds: NDArray[np.int8]  # [place, :] of an order without weight gradients
    stages: NDArray[np.int16]


class Patterns(NamedTuple):
    """Patterns: orders in which microbatch ``m`` runs every action ``m * interval`` after microbatch 0."""

    forward_at: Floats  # [pattern, stage]
    input_grad_at: Floats
    interval: Floats
    peak: Floats  # [pattern, rank] memory that an order needs when weight gradients follow at once


@compiled
def choose_starts(
    stages, num_microbatches, by_span, rules, most_s, enough_s, given, windows, best_orders
):  # fmt: skip
    """Fill `best_orders` with the shortest orders within `most_s` among those `given` and list schedules, until one takes
    `enough_s` or less.

    Each is timed under all of `rules`. Among orders of equal time the first is kept.
    """
    state, order = new_state(stages, num_microbatches), new_order(best_orders.kinds.shape[1])
    least = least_times(stages, num_microbatches, by_span)
    for n in range(len(given[0])):
        order.kinds[:], order.stages[:] = given[0][n], given[1][n]
        _consider(order, stages, by_span, rules, most_s, least, best_orders, state)
    shifts = np.zeros((4, stages.start.max() + 1))
    for n in range(len(windows)):
        for flags in range(18):
            if best_orders.seconds[0] <= enough_s:
                return
            deep = flags % 2 > 0
            if deep and len(stages.rank) == len(stages.limit):
                continue  # no rank has a choice among forwards
            rule = Rule(flags // 2 % 3, False, deep, 1.0, 0.5 * (flags // 6), UNLIMITED, False, 0.0)
            give_up_s = ORDER_ALONE * min(most_s, best_orders.seconds[-1])
            slack = give_up_s - least + first_arrivals(stages)
            deadlines = deadlines_of(stages, rule, shifts)
            seconds, listed = list_within(stages, num_microbatches, rule, windows[n], deadlines, slack)
            if seconds < np.inf:
                is_kept = listed.kinds != WEIGHT_GRAD
                order.kinds[:], order.stages[:] = listed.kinds[is_kept], listed.stages[is_kept]
                _consider(order, stages, by_span, rules, most_s, least, best_orders, state)


@compiled
def choose_patterns(stages, num_microbatches, by_span, rules, most_s, patterns, best_orders):
    """Fill `best_orders` as `choose_starts` does, from patterns."""
    state, order = new_state(stages, num_microbatches), new_order(best_orders.kinds.shape[1])
    least = least_times(stages, num_microbatches, by_span)
    for n in range(len(patterns.interval)):
        if (patterns.peak[n] <= stages.limit * (1.0 + TINY)).all():
            order_of_pattern(n, patterns, stages, num_microbatches, order)
            _consider(order, stages, by_span, rules, most_s, least, best_orders, state)


@compiled_helper
def _rule(row):
    return FillRule(row[0], row[1] > 0.0)


@compiled
def _consider(order, stages, by_span, rules, most_s, least, best_orders, state):
    """Insert the order into `best_orders` if it is shorter than one of them and than `most_s`."""
    best, best_rule = min(most_s, best_orders.seconds[-1]), -1
    peak, none = np.empty(len(stages.limit)), new_order(0)
    for index in range(len(rules)):
        seconds = time_order(order, stages, _rule(rules[index]), by_span, least, best, state, none)
        if seconds < best - TINY:
            best, best_rule = seconds, index
            peak[:] = state.peak
    if best_rule < 0 or (np.abs(best_orders.seconds - best) <= TINY).any():
        return
    place = len(best_orders.seconds) - 1
    while place > 0 and best_orders.seconds[place - 1] > best:
        best_orders.seconds[place] = best_orders.seconds[place - 1]
        best_orders.rule[place] = best_orders.rule[place - 1]
        best_orders.peak[place] = best_orders.peak[place - 1]
        best_orders.kinds[place] = best_orders.kinds[place - 1]
        best_orders.stages[place] = best_orders.stages[place - 1]
        place -= 1
    best_orders.seconds[place] = best
    best_orders.rule[place] = best_rule
    best_orders.peak[place] = peak
    best_orders.kinds[place] = order.kinds
    best_orders.stages[place] = order.stages


@compiled
def order_of_pattern(n, patterns, stages, num_microbatches, order):
    """Fill `order` from pattern `n`, with overlapping actions in the order of their times; return each rank's peak memory if
    weight gradients follow at once."""
    num_ranks = len(stages.offsets) - 1
    peak = np.zeros(num_ranks)
    count = np.zeros((2, len(stages.rank)), np.int64)
    for rank in range(num_ranks):
        low, high = stages.offsets[rank], stages.offsets[rank + 1]
        memory = 0.0
        for place in range(2 * num_microbatches * low, 2 * num_microbatches * high):
            first, kind, stage = np.inf, -1, -1
            for member in range(low, high):
                other = stages.members[member]
                m = count[FORWARD, other]
                at = patterns.forward_at[n, other] + m * patterns.interval[n]
                if m < num_microbatches and at < first:
                    first, kind, stage = at, FORWARD, other
                m = count[INPUT_GRAD, other]
                at = patterns.input_grad_at[n, other] + m * patterns.interval[n]
                if m < num_microbatches and at < first:
                    first, kind, stage = at, INPUT_GRAD, other
            order.kinds[place] = kind
            order.stages[place] = stage
            count[kind, stage] += 1
            memory += stages.saved[stage] if kind == FORWARD else -stages.saved[stage]
            peak[rank] = max(peak[rank], memory)
    return peak


@compiled
def peaks(patterns, stages, num_microbatches):
    """Fill in `patterns.peak`."""
    order = new_order(2 * num_microbatches * len(stages.rank))
    for n in range(len(patterns.interval)):
        patterns.peak[n] = order_of_pattern(n, patterns, stages, num_microbatches, order)


@compiled
def improve(
    order, stages, num_microbatches, by_span, rule, num_moves, most_moves, start_share, seed, good_enough_s
):  # fmt: skip
    """Improve an order by moving single actions by a few places; return the best seconds and complete order.

    The search continues for `num_moves` moves after every gain, up to `most_moves` in all.

    Moves that lengthen the order are accepted as in simulated annealing: by `start_share` of its length at first, then less.
    """
    np.random.seed(seed)
    counts = 2 * num_microbatches * np.diff(stages.offsets)
    num_ranks, longest = len(counts), counts.max()
    state, none = new_state(stages, num_microbatches), new_order(0)
    given, least = _rule(rule), least_times(stages, num_microbatches, by_span)
    best = time_order(order, stages, given, by_span, least, np.inf, state, none)
    best_order = Order(order.kinds.copy(), order.stages.copy())
    order, current = Order(order.kinds.copy(), order.stages.copy()), best
    step, until = 0, num_moves
    while step < until and best > good_enough_s:
        step += 1
        rank = np.random.randint(num_ranks)
        source = np.random.randint(longest)
        distance = 1 + int(6 * np.random.random() ** 2)
        target = source + distance if np.random.random() < 0.5 else source - distance
        target = min(max(target, 0), longest - 1)
        if source >= counts[rank] or target >= counts[rank]:
            continue
        source += 2 * num_microbatches * stages.offsets[rank]
        target += 2 * num_microbatches * stages.offsets[rank]
        if order.stages[source] == order.stages[target] and order.kinds[source] == order.kinds[target]:
            continue
        shift(order.kinds, source, target)
        shift(order.stages, source, target)
        share = start_share * 0.01 ** (step / num_moves)
        most = current - share * best * np.log(1.0 - np.random.random())
        seconds = time_order(order, stages, given, by_span, least, most, state, none)
        if seconds <= most + TINY:
            current = seconds
            if seconds < best - TINY:
                best = seconds
                until = max(until, min(step + num_moves, most_moves))
                best_order.kinds[:], best_order.stages[:] = order.kinds, order.stages
        else:
            shift(order.kinds, target, source)
            shift(order.stages, target, source)
    complete = new_order(3 * num_microbatches * len(stages.rank))
    best = time_order(best_order, stages, given, by_span, least, np.inf, state, complete)
    return best, complete
