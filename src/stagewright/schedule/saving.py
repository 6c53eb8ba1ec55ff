"""Lowering of memory saving: recomputation and offloading of saved values; and halves of backwards merged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from stagewright.errors import ScheduleError
from stagewright.schedule.action import COMPUTE, Action, Kind
from stagewright.schedule.program import Program

_BACKWARD = frozenset({Kind.I, Kind.B})


def insert_recomputation(program: Program, stages: Collection[int]) -> Program:
    """`program` in which the given stages compute their saved values again right before each backward.

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


def insert_offloading(program: Program, stages: Collection[int], *, ahead: int = 1) -> Program:
    """`program` in which the given stages keep their saved values on the host between forward and backward.

    Values come back `ahead` computations before they are used. Where fewer than ``ahead + 1`` computations
    lie between forward and backward, the values stay.

    >>> from stagewright.schedule.families import build
    >>> print("\\n".join(insert_offloading(build("gpipe", 1, 3), [0]).lines()))
    0F0 0OFFLOAD0 0F1 0OFFLOAD1 0FETCH0 0F2 0OFFLOAD2 0FETCH1 0B0 0FETCH2 0B1 0B2

    Raises:
        ScheduleError: a stage that is recomputed keeps nothing to offload.
    """
    for action in program:
        if action.kind is Kind.R and action.stage in stages:
            raise ScheduleError(
                f"{action}: a recomputed stage has no saved values to offload; choose one of the two"
            )
    return program.with_ranks(_with_offloading(actions, set(stages), ahead) for actions in program.ranks)


def merge_backwards(program: Program) -> Program:
    """`program` in which an input gradient directly before its weight gradient is one full backward.

    >>> print("\\n".join(merge_backwards(Program.from_text('''
    ...     program split
    ...     microbatches 2
    ...     placement 0
    ...     0: 0F0 0F1 0I0 0I1 0W1 0W0
    ... ''')).lines()))
    0F0 0F1 0I0 0B1 0W0
    """

    def merged(actions: Sequence[Action]) -> list[Action]:
        result: list[Action] = []
        for action in actions:
            if (
                action.kind is Kind.W
                and result
                and result[-1] == Action(Kind.I, action.stage, action.microbatch)
            ):
                result[-1] = Action(Kind.B, action.stage, action.microbatch)
            else:
                result.append(action)
        return result

    return program.with_ranks(map(merged, program.ranks))


def _with_offloading(actions: Sequence[Action], stages: set[int], ahead: int) -> Iterator[Action]:
    number = _computation_numbers(actions)
    parts = [
        (index, part) for index, action in enumerate(actions) for part in action.parts if part.stage in stages
    ]
    forward = {(p.stage, p.microbatch): index for index, p in parts if p.kind is Kind.F}
    backward = {(p.stage, p.microbatch): index for index, p in parts if p.kind in _BACKWARD}
    leaves: dict[int, list[Action]] = {}
    returns: dict[int, list[Action]] = {}
    for key, end in backward.items():
        start = forward[key]
        if number[end] - number[start] - 1 > ahead:
            leaves.setdefault(start, []).append(Action(Kind.OFFLOAD, *key))
            back = bisect_left(number, number[end] - ahead)
            returns.setdefault(back, []).append(Action(Kind.FETCH, *key))
    for index, action in enumerate(actions):
        yield from (*returns.get(index, ()), action, *leaves.get(index, ()))


def _computation_numbers(actions: Sequence[Action]) -> list[int]:
    """For each action how many computations its rank has begun with it."""
    numbers: list[int] = []
    for action in actions:
        numbers.append((numbers[-1] if numbers else 0) + (action.kind in COMPUTE))
    return numbers
