"""Memory limits below the given one that a search also tries, and times that no schedule beats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stagewright.schedule.automatic.kernels import TINY, Costs, Floats


def one_microbatch(costs: Costs) -> float:
    """Memory of the rank that needs most for one microbatch alone."""
    return float(_per_rank(costs, costs.saved).max())


def smaller_limits(costs: Costs, num_microbatches: int) -> Iterator[Floats]:
    """Every lower limit that is a multiple of half a microbatch's memory, per rank, the highest first.

    These steps are the same whatever the limit: whoever tries all of them never does worse with a higher one.
    Memory for all microbatches limits nothing, so nothing above it is tried.
    """
    step = one_microbatch(costs) / 2
    if step <= 0:
        return
    highest = min(float(costs.limit.max()), 2 * num_microbatches * step)
    for count in range(int(np.ceil((highest - TINY) / step)) - 1, 1, -1):
        yield np.minimum(costs.limit, count * step)


def shortest_possible(costs: Costs, num_microbatches: int, by_span: bool) -> float:
    """Seconds that no order within the limit undercuts, of the longest span of a rank or the makespan.

    A rank does all its work, and for the makespan waits for its first value. A microbatch occupies memory
    from its forward to its input gradient at the earliest, so many at a time as the limit allows.
    """
    work = costs.forward + costs.input_grad + costs.weight_grad
    busy_s = num_microbatches * _per_rank(costs, work)
    with np.errstate(divide="ignore", invalid="ignore"):
        memory_s = num_microbatches * _per_rank(costs, _occupied(costs)) / costs.limit
    span_s = np.maximum(busy_s, np.nan_to_num(memory_s))
    return float((span_s if by_span else span_s + _first_arrival(costs)).max())


def _occupied(costs: Costs) -> Floats:
    """Memory times seconds that a microbatch takes at least on every stage."""
    around = costs.forward + costs.input_grad
    crossing = costs.value_s + np.concatenate([[0.0], costs.gradient_s[:-1]])
    beyond = np.concatenate([np.cumsum((around + crossing)[:0:-1])[::-1], [0.0]])
    return costs.saved * (around + beyond) + costs.held * costs.weight_grad


def _first_arrival(costs: Costs) -> Floats:
    """When the first value can reach each rank."""
    arrival = np.concatenate([[0.0], np.cumsum(costs.forward[:-1] + costs.value_s[1:])])
    first = np.full(len(costs.limit), np.inf)
    np.minimum.at(first, costs.rank, arrival)
    return first


def _per_rank(costs: Costs, per_stage: Floats) -> Floats:
    total = np.zeros(len(costs.limit))
    np.add.at(total, costs.rank, per_stage)
    return total
