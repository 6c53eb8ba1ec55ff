"""Compiled local improvement of a program: single actions moved within their rank's order."""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled
from stagewright.schedule.list_scheduler.order_times import (
    least_times,
    new_order,
    new_state,
    shift,
    time_order,
)
from stagewright.schedule.list_scheduler.terms import Order


@compiled
def improve_order(stages, num_microbatches, order, num_steps, start_share, good_enough_s, seed):
    """Return the best order found by moving actions to nearby places, and its makespan.

    Steps that lengthen the order are accepted as in `anneal.anneal`.
    """
    np.random.seed(seed)
    num_ranks = len(stages.offsets) - 1
    state, none = new_state(stages, num_microbatches), new_order(0)
    least = least_times(stages, num_microbatches, False)
    current = time_order(order, stages, None, False, least, np.inf, state, none)
    best, best_order = current, Order(order.kinds.copy(), order.stages.copy())
    order = Order(order.kinds.copy(), order.stages.copy())
    for step in range(num_steps):
        if best <= good_enough_s:
            break
        rank = np.random.randint(num_ranks)
        low = 3 * num_microbatches * stages.offsets[rank]
        high = 3 * num_microbatches * stages.offsets[rank + 1]
        source = np.random.randint(low, high)
        distance = 1 + int(8 * np.random.random() ** 3)
        target = source + distance if np.random.random() < 0.5 else source - distance
        target = min(max(target, low), high - 1)
        if order.kinds[source] == order.kinds[target] and order.stages[source] == order.stages[target]:
            continue
        shift(order.kinds, source, target)
        shift(order.stages, source, target)
        share = start_share * (0.01 ** (step / num_steps))
        limit = current - share * best * np.log(1.0 - np.random.random())
        makespan = time_order(order, stages, None, False, least, limit, state, none)
        if makespan <= limit:
            current = makespan
            if makespan < best:
                best, best_order = makespan, Order(order.kinds.copy(), order.stages.copy())
        else:
            shift(order.kinds, target, source)
            shift(order.stages, target, source)
    return best, best_order
