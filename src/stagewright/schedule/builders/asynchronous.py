"""Asynchronous 1F1B: optimizer steps without a flush, with several versions of the weights. For simulation only."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.builders.linear import one_f_one_b
from stagewright.schedule.program import Program, build_program


def pipedream(num_ranks: int, num_microbatches: int) -> Program:
    """1F1B in which every stage steps after every backward; rank r keeps up to ``P - r`` versions of its weights.

    Source: Narayanan et al. 2019, "PipeDream", section 3.3 (weight stashing; SOSP '19).

    >>> program = pipedream(2, 3)
    >>> print("\\n".join(program.lines()))
    0F0 0F1 0B0 0STEP 0F2 0B1 0STEP 0B2 0STEP
    1F0 1B0 1STEP 1F1 1B1 1STEP 1F2 1B2 1STEP
    >>> weight_versions(program)
    [2, 1]
    """
    return _stepping("pipedream", num_ranks, num_microbatches, 1)


def pipedream_2bw(num_ranks: int, num_microbatches: int, *, step_every: int | None = None) -> Program:
    """1F1B that steps every `step_every` microbatches (default P, the minimum), with at most two versions of the weights.

    Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1 (arXiv
    2006.09503).

    >>> weight_versions(pipedream_2bw(4, 16))
    [2, 2, 2, 1]
    """
    step_every = num_ranks if step_every is None else step_every
    if step_every < num_ranks:
        raise ScheduleError(f"pipedream-2bw: step_every={step_every} must be at least the {num_ranks} ranks")
    return _stepping("pipedream-2bw", num_ranks, num_microbatches, step_every)


def weight_versions(program: Program) -> list[int]:
    """Return per rank how many versions of its weights are needed at once.

    A microbatch's backward uses the version that its forward used; a version lives until the last such backward.
    """
    if not any(action.kind is Kind.STEP for action in program):
        return [1] * program.num_ranks
    return [max(_versions_over_time(actions), default=1) for actions in program.ranks]


def _versions_over_time(actions: tuple[Action, ...]) -> Iterator[int]:
    newest = 0
    version_of: dict[tuple[int, int | None], int] = {}
    for action in actions:
        if action.kind is Kind.F:
            version_of[action.stage, action.microbatch] = newest
        elif action.kind in (Kind.B, Kind.W):
            version_of.pop((action.stage, action.microbatch), None)
        elif action.kind is Kind.STEP:
            newest += 1
        yield len({newest, *version_of.values()})


def _stepping(name: str, num_ranks: int, num_microbatches: int, step_every: int) -> Program:
    flushed = one_f_one_b(num_ranks, num_microbatches)

    def order(rank: int) -> Iterator[Action]:
        for action in flushed.ranks[rank]:
            yield action
            is_last = action.microbatch == num_microbatches - 1
            if action.kind is Kind.B and ((action.microbatch or 0) % step_every == step_every - 1 or is_last):
                yield Action(Kind.STEP, rank)

    return build_program(name, flushed.placement, num_microbatches, order)
