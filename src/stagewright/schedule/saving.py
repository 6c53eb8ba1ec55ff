"""Lowering of memory saving: recomputation right before the backward that needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.program import Program

_BACKWARD = frozenset({Kind.I, Kind.B})


def insert_recomputation(program: Program, stages: Collection[int]) -> Program:
    """`program` in which the given stages recompute, or fetch from the host, what each backward needs first right before it.

    >>> from stagewright.schedule.families import build
    >>> print("\\n".join(insert_recomputation(build("1f1b", 2, 1), [0]).lines()))
    0F0 0R0 0B0
    1F0 1B0
    """

    def with_recomputation(actions: Sequence[Action]) -> Iterator[Action]:
        for action in actions:
            for part in action.parts:
                if part.kind in _BACKWARD and part.stage in stages:
                    yield Action(Kind.R, part.stage, part.microbatch)
            yield action

    return program.with_ranks(map(with_recomputation, program.ranks))
