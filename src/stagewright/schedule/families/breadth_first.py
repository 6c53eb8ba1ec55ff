"""Breadth-first: all microbatches through one stage before the next."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families.pieces import backward
from stagewright.schedule.placement import loop
from stagewright.schedule.program import Program, build_program


def breadth_first(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    *,
    num_groups: int = 1,
    last_first: bool = False,
    split_backward: bool = False,
) -> Program:
    """The rank's stages in increasing order, forwards of all microbatches each; then in decreasing order,
    backwards.

    Makespan ``((v - 1) max(M, P) + M + P - 1)(t_f + t_b)`` for stage times t and any M; a rank holds all M
    v stage activations. Weights of a sharded stage are needed in one stretch per pass, so one gather serves
    all microbatches. With `num_groups` the microbatches go through in so many groups one after the other
    (depth first over groups, breadth first within), which holds only a group's activations at a time.
    `last_first`: backwards begin with the last microbatch.

    Source: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4 (arXiv 2211.05953); groups as
    in Fast-LLM's `depth_first_micro_batches`, `last_first` as in PyTorch's ScheduleLoopedBFS.

    >>> print("\\n".join(breadth_first(2, 2).lines()))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    >>> print("\\n".join(breadth_first(2, 2, num_groups=2).lines()))
    0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1
    1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1
    """
    if num_groups < 1 or num_microbatches % num_groups:
        raise ScheduleError(
            f"breadth-first: {num_groups} groups do not divide {num_microbatches} microbatches"
        )
    size = num_microbatches // num_groups

    def order(rank: int) -> Iterator[Action]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        for first in range(0, num_microbatches, size):
            group = range(first, first + size)
            for stage in stages:
                yield from (Action(Kind.F, stage, m) for m in group)
            for stage in reversed(stages):
                for m in reversed(group) if last_first else group:
                    yield from backward(stage, m, split_backward)

    return build_program("breadth-first", loop(num_ranks, num_chunks), num_microbatches, order)
