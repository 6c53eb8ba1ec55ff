"""Programs of many microbatches, shortened to as few as reach every state of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from stagewright.errors import ScheduleError
from stagewright.schedule import Action, Program
from stagewright.schedule.verify import check_complete, check_free_of_deadlock, check_placed

_KEPT_MICROBATCHES = 4
"""Least number of microbatches in the repetitions that stay."""


@lru_cache(maxsize=64)
def shortened(program: Program) -> Program:
    """Return a program with just enough microbatches to reach every state of its memory.

    If all ranks repeat the same actions for every microbatch or two, or (with several stages per rank) for every round of
    microbatches through a stage, only the first repetitions stay. Other programs, such as those that run all forwards first,
    are returned unchanged.
    """
    for period in sorted({1, 2, program.num_ranks, 2 * program.num_ranks}):
        parts = [_repetitions(actions, program.num_microbatches, period) for actions in program.ranks]
        kept = -(-_KEPT_MICROBATCHES // period)
        num_dropped = min(map(len, parts)) - 1 - kept
        if num_dropped > 0:
            short = replace(
                program,
                num_microbatches=program.num_microbatches - num_dropped * period,
                ranks=tuple(
                    (
                        *actions[: begins[kept]],
                        *(
                            _moved(action, -num_dropped * period)
                            for action in actions[begins[kept + num_dropped] :]
                        ),
                    )
                    for actions, begins in zip(program.ranks, parts, strict=True)
                ),
            )
            with suppress(ScheduleError):  # if microbatches are not in the order of their numbers
                check_placed(short)
                check_complete(short)
                check_free_of_deadlock(short)
                return short
    return program


def _repetitions(actions: Sequence[Action], num_microbatches: int, period: int) -> list[int]:
    """Return the index at which each repetition of a rank begins and, last, the one at which they end; empty if none does.

    A repetition has all actions of `period` microbatches, and differs from the one before in the numbers of the microbatches
    alone.

    >>> from stagewright.schedule import build
    >>> _repetitions(build("1f1b", 2, 5).actions(0), 5, 1), _repetitions(build("gpipe", 2, 5).actions(0), 5, 1)
    ([1, 3, 5, 7], [])
    """
    first = next((action for action in actions if action.microbatch is not None), None)
    num_actions, remainder = divmod(_num_numbered(actions) * period, num_microbatches)
    if first is None or remainder:
        return []
    begins = [
        index
        for index, action in enumerate(actions)
        if action.microbatch is not None
        and action.microbatch % period == 0
        and (action.kind, action.stage, action.peer) == (first.kind, first.stage, first.peer)
    ]
    longest: list[int] = []
    current: list[int] = []
    before: list[Action] | None = None
    for begin, end in pairwise(begins):
        if _num_numbered(actions[begin:end]) != num_actions:
            before = None
            continue
        number = actions[begin].microbatch
        assert number is not None
        relative = [_moved(action, -number) for action in actions[begin:end]]
        if relative == before:
            current.append(end)
        else:
            current, before = [begin, end], relative
        longest = max(longest, current, key=len)
    return longest


def _moved(action: Action, by: int) -> Action:
    """Return an action for the microbatch `by` after its own."""
    overlapped = None if action.overlapped is None else _moved(action.overlapped, by)
    if action.microbatch is None and overlapped is None:
        return action
    return replace(
        action,
        microbatch=None if action.microbatch is None else action.microbatch + by,
        overlapped=overlapped,
    )


def _num_numbered(actions: Sequence[Action]) -> int:
    """Return how many actions have a microbatch; an overlapped pair counts as two."""
    return sum(1 if action.overlapped is None else 2 for action in actions if action.microbatch is not None)
