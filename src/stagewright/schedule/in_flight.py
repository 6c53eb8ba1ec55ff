"""Microbatches in flight: how many a program keeps saved values of, per stage and per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.program import Program


@lru_cache(maxsize=8)
def in_flight(program: Program) -> tuple[int, ...]:
    """Return the peak number of microbatches whose saved values each stage holds.

    >>> from stagewright.schedule import build
    >>> in_flight(build("1f1b", 4, 8))
    (4, 3, 2, 1)
    """
    now, most = [0] * program.num_stages, [0] * program.num_stages
    for stage, change in changes(program):
        now[stage] += change
        most[stage] = max(most[stage], now[stage])
    return tuple(most)


def changes(actions: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Stage by stage as `actions` run, 1 where a forward saves the values of one more microbatch and -1 where the end of a
    backward frees them.

    >>> from stagewright.schedule import build
    >>> [*changes(build("1f1b", 2, 2).actions(1))]
    [(1, 1), (1, -1), (1, 1), (1, -1)]
    """
    for action in actions:
        for part in action.parts:
            if part.kind is Kind.F:
                yield part.stage, 1
            elif part.kind in (Kind.B, Kind.W):
                yield part.stage, -1


def peak_activations(program: Program) -> list[int]:
    """Return per rank the peak number of forwards, over its stages, whose backward is not done.

    >>> from stagewright.schedule import build
    >>> peak_activations(build("1f1b", 4, 8)), peak_activations(build("zb-v", 2, 6))
    ([4, 3, 2, 1], [4, 4])
    """
    return [
        max(accumulate((change for _, change in changes(actions)), initial=0)) for actions in program.ranks
    ]
