"""Schedules with several stages per rank, looped around the ranks: interleaved (depth-first) and breadth-first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.builders.pieces import backward, in_turn, rounds
from stagewright.schedule.placement import loop
from stagewright.schedule.program import Program, build_program


def interleaved_1f1b(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    *,
    split_backward: bool = False,
    round_size: int | None = None,
) -> Program:
    """1F1B over stages looped around the ranks; a rank changes its stage with every round of microbatches.

    A round has `round_size` microbatches, by default P, or more if that does not divide M, so that any M works; with M < P
    there is one round. Makespan ``((v - 1) max(M, P) + M + P - 1)(t_f + t_b)`` for stage times t; if P divides M, rank r
    holds at most ``(v - 1) P + 2 (P - 1 - r) + 1`` stage activations.

    With rounds of P, no transfer around the ranks is hidden: a microbatch comes back just when its first rank has nothing
    else to do. Rounds with k more microbatches hide these transfers, for k more stage activations per further chunk.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2 (arXiv
    2104.04473); longer rounds as in Megatron-LM (`microbatch-group-size-per-virtual-pipeline-stage`).

    Raises:
        ScheduleError: a round is shorter than P, so that ranks would wait for each other.

    >>> print("\\n".join(interleaved_1f1b(2, 2).lines()))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """

    size = num_ranks if round_size is None else round_size
    if size < num_ranks:
        raise ScheduleError(
            f"interleaved-1f1b: rounds of {size} microbatches are too short for {num_ranks} ranks: "
            f"set round_size to {num_ranks} or more"
        )

    def order(rank: int) -> Iterator[Action]:
        forwards, backwards = _orders(num_ranks, num_microbatches, num_chunks, rank, size)
        whole = [backward(stage, m, split_backward) for stage, m in backwards]
        longest = len(rounds(num_microbatches, size)[0])
        return in_turn(forwards, whole, (num_chunks - 1) * longest + 2 * (num_ranks - 1 - rank))

    return build_program("interleaved-1f1b", loop(num_ranks, num_chunks), num_microbatches, order)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Program:
    """Interleaved 1F1B with half the warm-up, and weight gradients `rank` backwards after their input gradients.

    Source: ScheduleInterleavedZeroBubble of torch.distributed.pipelining (PyTorch 2.13), after Qi et al.
    2023, "Zero Bubble Pipeline Parallelism", section 2 (arXiv 2401.10241).

    >>> print("\\n".join(interleaved_zero_bubble(2, 2).lines()))
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """

    def order(rank: int) -> Iterator[Action]:
        forwards, backwards = _orders(num_ranks, num_microbatches, num_chunks, rank, num_ranks)
        deferred: list[list[Action]] = [[]] * rank + [[Action(Kind.W, stage, m)] for stage, m in backwards]
        split = [
            [Action(Kind.I, stage, m), *late] for (stage, m), late in zip(backwards, deferred, strict=False)
        ]
        longest = len(rounds(num_microbatches, num_ranks)[0])
        yield from in_turn(forwards, split, (num_chunks - 1) * longest + num_ranks - 1 - rank)
        yield from chain.from_iterable(deferred[len(backwards) :])

    return build_program("interleaved-zb", loop(num_ranks, num_chunks), num_microbatches, order)


def _orders(
    num_ranks: int, num_microbatches: int, num_chunks: int, rank: int, round_size: int
) -> tuple[list[Action], list[tuple[int, int]]]:
    """Return all forwards of `rank` in order, and (stage, microbatch) of all backwards, in rounds of at least
    `round_size`."""
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    groups = rounds(num_microbatches, round_size)
    forwards = [Action(Kind.F, stage, m) for group in groups for stage in stages for m in group]
    return forwards, [(stage, m) for group in groups for stage in reversed(stages) for m in group]


def breadth_first(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    *,
    num_groups: int = 1,
    last_first: bool = False,
    split_backward: bool = False,
) -> Program:
    """Forwards of all microbatches, stage by stage; then backwards of all microbatches, in reverse order of stages.

    Makespan ``((v - 1) max(M, P) + M + P - 1)(t_f + t_b)`` for stage times t and any M; a rank holds all M v stage
    activations. A sharded stage uses its weights without interruption, so one gather serves all microbatches. With
    `num_groups` the microbatches are divided into groups that follow each other (depth first over groups, breadth first
    within), so that only one group's activations are held at a time. `last_first`: backwards begin with the last microbatch.

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
