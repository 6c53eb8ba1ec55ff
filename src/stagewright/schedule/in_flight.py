"""Microbatches in flight: how many a program keeps saved values of, per stage and per rank."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from stagewright.schedule.action import Kind
from stagewright.schedule.program import Program


@lru_cache(maxsize=8)
def in_flight(program: Program) -> tuple[int, ...]:
    """Return the peak number of microbatches whose saved values each stage holds.

    >>> from stagewright.schedule import build
    >>> in_flight(build("1f1b", 4, 8))
    (4, 3, 2, 1)
    """
    now, most = [0] * program.num_stages, [0] * program.num_stages
    for action in program.without_pairs():
        if action.kind is Kind.F:
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif action.kind in (Kind.B, Kind.W):
            now[action.stage] -= 1
    return tuple(most)


def peak_activations(program: Program) -> list[int]:
    """Return per rank the peak number of forwards, over its stages, whose backward is not done.

    >>> from stagewright.schedule import build
    >>> peak_activations(build("1f1b", 4, 8)), peak_activations(build("zb-v", 2, 6))
    ([4, 3, 2, 1], [4, 4])
    """
    changes = (
        [(p.kind is Kind.F) - (p.kind in (Kind.B, Kind.W)) for action in actions for p in action.parts]
        for actions in program.ranks
    )
    return [max(0, *accumulate(change)) for change in changes]
