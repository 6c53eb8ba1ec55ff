"""Building blocks of several schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from stagewright.schedule.action import Action, Kind


def backward(stage: int, microbatch: int, split: bool) -> tuple[Action, ...]:
    """Return a full backward, or its input gradient followed by its weight gradient.

    >>> [str(action) for action in backward(2, 0, split=True)]
    ['2I0', '2W0']
    """
    if split:
        return Action(Kind.I, stage, microbatch), Action(Kind.W, stage, microbatch)
    return (Action(Kind.B, stage, microbatch),)


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], warmup: int
) -> Iterator[Action]:
    """Yield 1F1B: after `warmup` forwards, one forward (if any is left) and one backward in turn."""
    yield from forwards[:warmup]
    for forward, backward in zip_longest(forwards[warmup:], backwards):
        if forward is not None:
            yield forward
        yield from backward


def rounds(num_microbatches: int, at_least: int) -> list[range]:
    """Divide microbatches into as many rounds of `at_least` microbatches as possible, longer rounds first.

    >>> rounds(8, 4), rounds(7, 3), rounds(2, 4)
    ([range(0, 4), range(4, 8)], [range(0, 4), range(4, 7)], [range(0, 2)])
    """
    count = max(1, num_microbatches // at_least)
    size, longer = divmod(num_microbatches, count)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def numbered(steps: Iterable[tuple[Kind, int | None]], num_microbatches: int) -> Iterator[Action]:
    """Give each step (kind, stage) the next microbatch of that kind and stage; leave out microbatches that do not exist.

    A weight gradient belongs to the oldest input gradient without one: of its stage, or of any if its stage is None. Leaving
    microbatches out keeps an order valid, because no microbatch waits for another.

    >>> steps = [(Kind.F, 0), (Kind.F, 0), (Kind.B, 0), (Kind.I, 0), (Kind.W, None)]
    >>> " ".join(map(str, numbered(steps, 2)))
    '0F0 0F1 0B0 0I1 0W1'
    """
    count: Counter[tuple[Kind, int | None]] = Counter()
    pending: list[Action] = []
    for kind, stage in steps:
        if kind is Kind.W:
            done = next((action for action in pending if stage in (None, action.stage)), None)
            if done is None:
                continue
            pending.remove(done)
            action = Action(Kind.W, done.stage, done.microbatch)
        else:
            assert stage is not None
            counter = (Kind.F if kind is Kind.F else Kind.B, stage)
            action = Action(kind, stage, count[counter])
            count[counter] += 1
            pending += [action] if kind is Kind.I else []
        if (action.microbatch or 0) < num_microbatches:
            yield action
