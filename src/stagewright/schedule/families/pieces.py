"""Pieces that several schedule families are made of."""

from __future__ import annotations

from stagewright.schedule.action import Action, Kind


def backward(stage: int, microbatch: int, split: bool) -> tuple[Action, ...]:
    """A full backward, or its input gradient with the weight gradient right behind.

    >>> [str(action) for action in backward(2, 0, split=True)]
    ['2I0', '2W0']
    """
    if split:
        return Action(Kind.I, stage, microbatch), Action(Kind.W, stage, microbatch)
    return (Action(Kind.B, stage, microbatch),)
