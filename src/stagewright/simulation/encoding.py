"""Programs as arrays for the event engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stagewright.schedule.action import Action
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program


@dataclass(frozen=True, eq=False)
class EncodedProgram:
    """A program whose actions are indices into `patterns`, the distinct actions moved to microbatch 0.

    Action `i` is pattern `pattern[i]` of microbatch `microbatch[i]`; rank `r` owns actions `offsets[r]` to
    `offsets[r + 1]`. Build it once and simulate it under many costs.
    """

    name: str
    placement: Placement
    num_microbatches: int
    patterns: tuple[Action, ...]
    pattern: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_actions(self) -> int:
        return len(self.pattern)

    def action(self, index: int) -> Action:
        """Return the action at `index` in the concatenation of all ranks."""
        return _shifted(self.patterns[self.pattern[index]], int(self.microbatch[index]))

    def rank_slice(self, rank: int) -> slice:
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))


def _shifted(action: Action, by: int) -> Action:
    """Return `action` with its microbatch increased by `by`."""
    if action.microbatch is None:
        return action
    overlapped = action.overlapped and _shifted(action.overlapped, by)
    return Action(action.kind, action.stage, action.microbatch + by, action.peer, overlapped)


@lru_cache(maxsize=8)
def encode(program: Program) -> EncodedProgram:
    """Encode `program` as arrays; cached, because a program is simulated under many costs."""
    index_of: dict[tuple[object, ...], int] = {}
    patterns: list[Action] = []
    pattern = np.empty(program.num_actions, np.int32)
    microbatch = np.zeros(program.num_actions, np.int32)
    for i, action in enumerate(program):
        overlapped, first = action.overlapped, action.microbatch or 0
        lag = None if overlapped is None else (overlapped.stage, (overlapped.microbatch or 0) - first)
        key = (action.kind, action.stage, action.peer, lag)
        index = index_of.get(key)
        if index is None:
            index = index_of[key] = len(patterns)
            patterns.append(_shifted(action, -first))
        pattern[i] = index
        microbatch[i] = first
    offsets = np.concatenate([[0], np.cumsum([len(actions) for actions in program.ranks])]).astype(np.int64)
    return EncodedProgram(
        program.name,
        program.placement,
        program.num_microbatches,
        tuple(patterns),
        pattern,
        microbatch,
        offsets,
    )
