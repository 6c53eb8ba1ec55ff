"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families.pieces import backward
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
