"""Memory limits below the given one that a search also tries, and times that no schedule beats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stagewright.schedule.list_scheduler.arrivals import first_arrivals
from stagewright.schedule.list_scheduler.terms import TINY, Floats, Stages


def one_microbatch(stages: Stages) -> float:
    """Memory of the rank that needs most for one microbatch alone."""
    return float(_per_rank(stages, stages.saved).max())


def smaller_limits(stages: Stages, num_microbatches: int) -> Iterator[Floats]:
    """Every lower limit that is a multiple of half a microbatch's memory, per rank, the highest first.

    These steps are the same whatever the limit, so whoever tries them all does no worse with a higher one.
    Memory for all microbatches limits nothing, so nothing above it is tried.
    """
    step = one_microbatch(stages) / 2
    if step <= 0:
        return
    highest = min(float(stages.limit.max()), 2 * num_microbatches * step)
    for count in range(int(np.ceil((highest - TINY) / step)) - 1, 1, -1):
        yield np.minimum(stages.limit, count * step)


def shortest_possible(stages: Stages, num_microbatches: int, by_span: bool) -> float:
    """Seconds that no order within the limit undercuts, of the longest span of a rank or the makespan.

    A microbatch occupies memory from its forward to its input gradient at the earliest, so many at a time as the limit
    allows. A rank does all its work; beside it the ranks before it wait for the first value to reach it and for the
    last gradient to come back from it. For the makespan a rank waits for its first value as well.
    """
    num_ranks = len(stages.limit)
    first = np.array(
        [stages.members[stages.offsets[rank] : stages.offsets[rank + 1]].min() for rank in range(num_ranks)]
    )
    forward_at = np.cumsum(stages.forward + stages.hop) - stages.forward
    back_s = np.append(0.0, np.cumsum(stages.input_grad[:-1] + stages.hop[1:]))
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
    """Seconds of a rank's span, and of that to its last input gradient.

    Until the first microbatch of a round is back a rank has no more to do than the forwards that it has memory for. A
    rank of one stage has memory for the next round only when the first of this one is back. Behind the last input
    gradient are no more weight gradients than memory is held for.
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
    trip += float(stages.hop[low + 1 :].sum() + stages.hop[high + 1 :].sum())
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
    left = num_microbatches - before * size
    begun_s = before * round_s + np.maximum(0.0, trip - np.minimum(size, left) * float(forward.sum()))
    whole_s = begun_s + left * (to_last_s + last_s)
    without_last_s = begun_s + left * to_last_s
    if len(members) == 1:
        without_last_s += np.maximum(0.0, left - put_off) * last_s
    return float(whole_s.max()), float(without_last_s.max())


def _occupied(stages: Stages) -> Floats:
    """Memory times seconds that a microbatch takes at least on every stage."""
    around = stages.forward + stages.input_grad
    beyond = np.concatenate([np.cumsum((around + 2 * stages.hop)[:0:-1])[::-1], [0.0]])
    return stages.saved * (around + beyond) + stages.held * stages.weight_grad


def _per_rank(stages: Stages, per_stage: Floats) -> Floats:
    total = np.zeros(len(stages.limit))
    np.add.at(total, stages.rank, per_stage)
    return total
