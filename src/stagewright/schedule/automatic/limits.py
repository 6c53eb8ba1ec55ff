"""Smaller memory limits for a search to try, and lower bounds on the time of a schedule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stagewright.arrays import Floats
from stagewright.schedule.list_scheduler.arrivals import first_arrivals
from stagewright.schedule.list_scheduler.terms import TINY, Stages


def one_microbatch(stages: Stages) -> float:
    """Return the memory of one microbatch on the rank that needs most."""
    return float(_per_rank(stages, stages.saved).max())


def smaller_limits(stages: Stages, num_microbatches: int) -> Iterator[Floats]:
    """Yield per rank all smaller limits that are multiples of half a microbatch's memory, the highest first.

    These steps are the same for every limit, so a search over all of them is not worse with a higher limit. Memory for all
    microbatches is no restriction, so nothing above it is tried.
    """
    step = one_microbatch(stages) / 2
    if step <= 0:
        return
    highest = min(float(stages.limit.max()), 2 * num_microbatches * step)
    for count in range(int(np.ceil((highest - TINY) / step)) - 1, 1, -1):
        yield np.minimum(stages.limit, count * step)


def shortest_possible(stages: Stages, num_microbatches: int, by_span: bool) -> float:
    """Return a lower bound in seconds, within the limit, on the longest span of a rank or the makespan.

    A microbatch occupies memory at least from its forward to its input gradient, and the limit bounds how many do at a time.
    A rank does all its work; meanwhile the ranks before it wait for the first value to reach it and for the last gradient
    to come back from it. For the makespan a rank waits for its first value as well.
    """
    num_ranks = len(stages.limit)
    first = np.array(
        [stages.members[stages.offsets[rank] : stages.offsets[rank + 1]].min() for rank in range(num_ranks)]
    )
    forward_at = np.cumsum(stages.forward + stages.transfer) - stages.forward
    back_s = np.append(0.0, np.cumsum(stages.input_grad[:-1] + stages.transfer[1:]))
    with np.errstate(divide="ignore", invalid="ignore"):
        memory_s = num_microbatches * _per_rank(stages, _occupied(stages)) / stages.limit
    span_s = np.nan_to_num(memory_s)
    for rank in range(num_ranks):
        whole_s, without_last_s = _in_rounds(rank, stages, num_microbatches)
        span_s[rank] = max(span_s[rank], whole_s)
        for other in np.flatnonzero(first < first[rank]):
            way_s = (
                forward_at[first[rank]]
                - forward_at[first[other]]
                + back_s[first[rank]]
                - back_s[first[other]]
            )
            span_s[other] = max(span_s[other], way_s + without_last_s + stages.weight_grad[first[other]])
    return float((span_s if by_span else span_s + first_arrivals(stages)).max())


def _in_rounds(rank: int, stages: Stages, num_microbatches: int) -> tuple[float, float]:
    """Return lower bounds on a rank's span, and on the part of it up to its last input gradient, in seconds.

    Until the first microbatch of a round is back, a rank can only run the forwards that it has memory for. A rank of one
    stage has memory for the next round only when the first microbatch of this one is back. The number of weight gradients
    after the last input gradient is bounded by the memory that they need.
    """
    members = stages.members[stages.offsets[rank] : stages.offsets[rank + 1]]
    low, high = int(members.min()), int(members.max())
    forward, input_grad, weight_grad, saved, held = (
        column[members]
        for column in (stages.forward, stages.input_grad, stages.weight_grad, stages.saved, stages.held)
    )
    limit = float(stages.limit[rank]) * (1.0 + TINY)
    to_last_s, last_s = float((forward + input_grad).sum()), float(weight_grad.sum())
    trip = float(stages.forward[low:].sum() + stages.input_grad[high + 1 :].sum())
    trip += float(stages.transfer[low + 1 :].sum() + stages.transfer[high + 1 :].sum())
    before, round_s, size = np.zeros(1), 0.0, float(num_microbatches)
    if saved.min() > 0 and np.isfinite(limit):
        size = min(
            size,
            float((limit / saved * forward).max() / forward.sum()) if len(members) > 1 else limit // saved[0],
        )
    put_off = num_microbatches if held.min() <= 0 or not np.isfinite(limit) else limit // held.min()
    if len(members) == 1 and size >= 1:
        # where nothing else is freed before, also when its weight gradient or the next input gradient is done
        more_s = min(last_s, float(input_grad[0])) if size * saved[0] + held[0] > limit else 0.0
        round_s = trip + float(input_grad[0]) + (last_s if held[0] >= saved[0] else more_s)
        before = np.arange((num_microbatches - 1) // size + 1)
    remaining = num_microbatches - before * size
    begun_s = before * round_s + np.maximum(0.0, trip - np.minimum(size, remaining) * float(forward.sum()))
    whole_s = begun_s + remaining * (to_last_s + last_s)
    without_last_s = begun_s + remaining * to_last_s
    if len(members) == 1:
        without_last_s += np.maximum(0.0, remaining - put_off) * last_s
    return float(whole_s.max()), float(without_last_s.max())


def _occupied(stages: Stages) -> Floats:
    """Return a lower bound on memory times seconds of a microbatch on every stage."""
    around = stages.forward + stages.input_grad
    beyond = np.concatenate([np.cumsum((around + 2 * stages.transfer)[:0:-1])[::-1], [0.0]])
    return stages.saved * (around + beyond) + stages.held * stages.weight_grad


def _per_rank(stages: Stages, per_stage: Floats) -> Floats:
    total = np.zeros(len(stages.limit))
    np.add.at(total, stages.rank, per_stage)
    return total
