"""1F1B: a backward as soon as one is ready."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families.pieces import backward
from stagewright.schedule.placement import linear
from stagewright.schedule.program import Program, build_program


def one_f_one_b(num_ranks: int, num_microbatches: int, *, split_backward: bool = False) -> Program:
    """One forward, one backward in turn after ``P - 1 - rank`` forwards of warm-up.

    Bubble ``(P - 1)(t_F + t_B)``; rank r holds at most ``min(P - r, M)`` microbatches.
    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush,
    section 3.2, arXiv 2006.09503); Fan et al. 2021, "DAPPLE", section 3 (arXiv 2007.01045).

    >>> print("\\n".join(one_f_one_b(2, 3).lines()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """

    def order(rank: int) -> Iterator[Action]:
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        for m in range(warmup):
            yield Action(Kind.F, rank, m)
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                yield Action(Kind.F, rank, m + warmup)
            yield from backward(rank, m, split_backward)

    return build_program("1f1b", linear(num_ranks), num_microbatches, order)
