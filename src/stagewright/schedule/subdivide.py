"""Division of stages into consecutive parts on the same rank: smaller units to gather, release and reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest

from stagewright.errors import ScheduleError
from stagewright.schedule.action import BACKWARDS, COMPUTE, Action, Kind, pair
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program


def subdivided(program: Program, num_parts: Sequence[int]) -> Program:
    """Divide stage `s` into `num_parts[s]` consecutive stages on its rank.

    A forward becomes the forwards of the parts in order, a backward, full or split, those in reverse order. The input
    gradient still comes before all weight gradients of its stage, so that other ranks do not wait longer. A recomputation
    right before its backward is divided with it: each part is recomputed right before its own backward, so that one part at
    a time is recomputed. In an overlapped pair, forwards of parts overlap with backwards of parts one to one, and the
    remainder of the longer follows.

    >>> from stagewright.schedule.builders import build
    >>> print(subdivided(build("1f1b", 2, 2), [2, 1]).to_text())
    program 1f1b
    microbatches 2
    placement 0 0 1
    0: 0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
    1: 2F0 2B0 2F1 2B1
    <BLANKLINE>

    Raises:
        ScheduleError: `num_parts` is not one number of at least 1 for each stage; or the program has transfers, sharding or
            steps: these follow from the parts, and optimizer steps in the middle of a batch belong to whole stages.
    """
    if len(num_parts) != program.num_stages or min(num_parts) < 1:
        raise ScheduleError(
            f"num_parts={list(num_parts)}: give each of the {program.num_stages} stages of {program.name} a number of "
            "parts, at least 1"
        )
    if max(num_parts) == 1:
        return program
    firsts = [0, *accumulate(num_parts)]
    parts = [range(first, last) for first, last in pairwise(firsts)]
    placed = program.placement.rank_of_stage
    placement = Placement(
        tuple(placed[stage] for stage, stage_parts in enumerate(parts) for _ in stage_parts)
    )
    ranks = (tuple(_divided(actions, parts)) for actions in program.ranks)
    return replace(program, placement=placement, ranks=tuple(ranks))


def _divided(actions: Sequence[Action], parts: Sequence[range]) -> Iterator[Action]:
    recomputing: Action | None = None
    for action in actions:
        backward = action.parts[-1]
        if recomputing is not None and not _follows(backward, recomputing):
            yield from _parts(recomputing, parts)
            recomputing = None
        if action.kind is Kind.R:
            recomputing = action
            continue
        yield from _pieces(action, recomputing, parts)
        recomputing = None
    if recomputing is not None:
        yield from _parts(recomputing, parts)


def _follows(backward: Action, recomputing: Action) -> bool:
    """Whether a backward uses the recomputation right before it."""
    same = (backward.stage, backward.microbatch) == (recomputing.stage, recomputing.microbatch)
    return same and backward.kind in BACKWARDS


def _pieces(action: Action, recomputing: Action | None, parts: Sequence[range]) -> Iterator[Action]:
    """Yield the parts of an action, those of its backward with a recomputation before each."""
    again: Sequence[Action] = () if recomputing is None else _parts(recomputing, parts)
    *forward, last = (_parts(part, parts) for part in action.parts)
    for index, piece in enumerate(zip_longest(*forward, last)):
        if again and index < len(again):
            yield again[index]
        pieces = [part for part in piece if part is not None]
        yield pieces[0] if len(pieces) == 1 else pair(*pieces)


def _parts(action: Action, parts: Sequence[range]) -> list[Action]:
    """Return an action of a stage as actions of its parts, in running order."""
    if action.kind not in COMPUTE:
        raise ScheduleError(
            f"{action}: the stages of a program are divided before transfers, sharding and optimizer steps are put in; "
            "give the program of computations and recomputation"
        )
    stage_parts = parts[action.stage]
    return [
        Action(action.kind, part, action.microbatch)
        for part in (stage_parts if action.kind is Kind.F else reversed(stage_parts))
    ]
