"""Schedules with one stage per rank: GPipe, 1F1B, and ZB-H1 and ZB-H2, which defer weight gradients to fill bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.builders.pieces import backward, in_turn
from stagewright.schedule.placement import linear
from stagewright.schedule.program import Program, build_program


def gpipe(num_ranks: int, num_microbatches: int, *, split_backward: bool = False) -> Program:
    """All forwards of the batch, then all backwards, on one stage per rank.

    Bubble ``(P - 1)(t_F + t_B)``; every rank holds all M microbatches.
    Source: Huang et al. 2019, "GPipe", section 2.3 (arXiv 1811.06965).

    >>> print("\\n".join(gpipe(2, 3).lines()))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2
    """

    def order(rank: int) -> Iterator[Action]:
        for m in range(num_microbatches):
            yield Action(Kind.F, rank, m)
        for m in range(num_microbatches):
            yield from backward(rank, m, split_backward)

    return build_program("gpipe", linear(num_ranks), num_microbatches, order)


def one_f_one_b(num_ranks: int, num_microbatches: int, *, split_backward: bool = False) -> Program:
    """One forward and one backward in turn after ``P - 1 - rank`` forwards of warm-up.

    Bubble ``(P - 1)(t_F + t_B)``; rank r holds at most ``min(P - r, M)`` microbatches.
    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush,
    section 3.2, arXiv 2006.09503); Fan et al. 2021, "DAPPLE", section 3 (arXiv 2007.01045).

    >>> print("\\n".join(one_f_one_b(2, 3).lines()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """

    def order(rank: int) -> Iterator[Action]:
        forwards = [Action(Kind.F, rank, m) for m in range(num_microbatches)]
        backwards = [backward(rank, m, split_backward) for m in range(num_microbatches)]
        return in_turn(forwards, backwards, warmup=num_ranks - 1 - rank)

    return build_program("1f1b", linear(num_ranks), num_microbatches, order)


def zb_h1(num_ranks: int, num_microbatches: int) -> Program:
    """1F1B with as many deferred weight gradients as the memory of 1F1B allows.

    Bubble ``(P - 1)(t_F + t_I - t_W)``, memory of 1F1B.
    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 (arXiv 2401.10241).

    >>> print("\\n".join(zb_h1(3, 4).lines()))
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    return _handmade("zb-h1", num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Program:
    """ZB-H1 with more forwards before the first backward: no bubble for t_F = t_I = t_W, with nearly twice the memory.

    Bubble ``(P - 1)(t_F + t_I - 2 t_W)`` of the longest rank's span from its first to its last computation,
    given at least ``2 P - 1`` microbatches; rank 0 holds ``2 P - 1`` of them. The optimizer must not wait
    for all ranks.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2 (arXiv
    2401.10241).

    >>> print("\\n".join(zb_h2(2, 4).lines()))
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    return _handmade("zb-h2", num_ranks, num_microbatches, 2)


def _handmade(name: str, num_ranks: int, num_microbatches: int, factor: int) -> Program:
    """Build a schedule whose weight gradients begin once a rank has issued as many forwards as rank 0 in warm-up."""

    def order(rank: int) -> Iterator[Action]:
        warmup = min(num_microbatches, factor * (num_ranks - 1 - rank) + 1)
        fill_from = min(num_microbatches, factor * (num_ranks - 1) + 1)
        num_weight_grads = 0
        yield from (Action(Kind.F, rank, m) for m in range(warmup))
        for m in range(num_microbatches):
            yield Action(Kind.I, rank, m)
            if m + warmup >= fill_from:
                yield Action(Kind.W, rank, num_weight_grads)
                num_weight_grads += 1
            if m + warmup < num_microbatches:
                yield Action(Kind.F, rank, m + warmup)
        yield from (Action(Kind.W, rank, m) for m in range(num_weight_grads, num_microbatches))

    return build_program(name, linear(num_ranks), num_microbatches, order)
