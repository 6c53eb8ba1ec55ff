"""Interleaved 1F1B: several stages per rank, microbatches depth first."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families.pieces import backward, rounds
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
    """1F1B over stages that loop around the ranks; the stage changes with every round of microbatches.

    A round has `round_size` microbatches, by default P, or more where that does not divide M, so that any M
    works; with M < P there is one round. Makespan ``((v - 1) max(M, P) + M + P - 1)(t_f + t_b)`` for stage
    times t; with P dividing M the rank r holds at most ``(v - 1) P + 2 (P - 1 - r) + 1`` stage activations.

    With rounds of P, every transfer around the ranks is waited for: a microbatch comes back just when its
    first rank has nothing else to do. Rounds a few microbatches longer hide these transfers for as many more
    stage activations per further chunk.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2 (arXiv
    2104.04473); longer rounds as in Megatron-LM (`microbatch-group-size-per-virtual-pipeline-stage`).

    Raises:
        ScheduleError: a round shorter than P, in which ranks would wait for each other.

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
        forwards, backwards = passes(num_ranks, num_microbatches, num_chunks, rank, size)
        longest = len(rounds(num_microbatches, size)[0])
        warmup = min(len(forwards), (num_chunks - 1) * longest + 2 * (num_ranks - 1 - rank))
        for stage, m in forwards[:warmup]:
            yield Action(Kind.F, stage, m)
        for index, (stage, m) in enumerate(backwards):
            for forward in forwards[index + warmup : index + warmup + 1]:
                yield Action(Kind.F, *forward)
            yield from backward(stage, m, split_backward)

    return build_program("interleaved-1f1b", loop(num_ranks, num_chunks), num_microbatches, order)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Program:
    """Interleaved 1F1B with half the warm-up and weight gradients `rank` backwards behind their input
    gradients.

    Source: ScheduleInterleavedZeroBubble of torch.distributed.pipelining (PyTorch 2.13), after Qi et al.
    2023, "Zero Bubble Pipeline Parallelism", section 2 (arXiv 2401.10241).

    >>> print("\\n".join(interleaved_zero_bubble(2, 2).lines()))
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """

    def order(rank: int) -> Iterator[Action]:
        forwards, backwards = passes(num_ranks, num_microbatches, num_chunks, rank, num_ranks)
        longest = len(rounds(num_microbatches, num_ranks)[0])
        warmup = min(len(forwards), (num_chunks - 1) * longest + num_ranks - 1 - rank)
        for stage, m in forwards[:warmup]:
            yield Action(Kind.F, stage, m)
        for index, (stage, m) in enumerate(backwards):
            for forward in forwards[index + warmup : index + warmup + 1]:
                yield Action(Kind.F, *forward)
            yield Action(Kind.I, stage, m)
            if index >= rank:
                yield Action(Kind.W, *backwards[index - rank])
        for stage, m in backwards[len(backwards) - rank :] if rank < len(backwards) else backwards:
            yield Action(Kind.W, stage, m)

    return build_program("interleaved-zb", loop(num_ranks, num_chunks), num_microbatches, order)


def passes(
    num_ranks: int, num_microbatches: int, num_chunks: int, rank: int, round_size: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (stage, microbatch) of all forwards of `rank` in order, and of all backwards, in rounds of at least
    `round_size`."""
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    groups = rounds(num_microbatches, round_size)
    forwards = [(stage, m) for group in groups for stage in stages for m in group]
    return forwards, [(stage, m) for group in groups for stage in reversed(stages) for m in group]
