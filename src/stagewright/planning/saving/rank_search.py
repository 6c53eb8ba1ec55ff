"""Looking for the choice of one rank that fits and adds least: a need after another, each proved by replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stagewright.estimation.memory import RankMemory
from stagewright.planning.saving.problem import Choice
from stagewright.planning.saving.proposals import Proposal, Propose

_CLOSE = 0.01
"""Choices for needs that differ by less than this are as good as each other."""

_WITHIN = 0.1
"""The next need is at least this part of what lies between the known ones away from either."""


@dataclass(frozen=True)
class Proved:
    choice: Choice
    memory: RankMemory


class RankSearch:
    """Raises what a rank must save until a choice fits, then lowers it as long as one does.

    Choices that promise to add `below_s` or more to a microbatch are of no use, nor are those that save more.
    """

    def __init__(self, kept: RankMemory, limit: int, ways: Propose | None, below_s: float = math.inf) -> None:
        self.rank = kept.rank
        self.limit = limit
        self.excess = kept.peak_bytes - limit
        self.best = Proved(Choice(), kept) if self.excess <= 0 else None
        self.latest = Proposal(Choice(), 0.0)
        self.seconds = math.inf if self.excess > 0 else 0.0
        self.ways = ways
        self.below_s = below_s
        self.need = float(self.excess)
        self.low, self.high = Tried(0.95 * self.need, 0.05 * self.need), Tried(math.inf, -math.inf)
        self.step = 0.0
        self.tried: dict[Choice, int] = {}
        self.took_least = False

    def propose(self) -> bool:
        """Sets the next choice to replay; false when the search is over."""
        while self.ways is not None and (self.best is None or not self._is_close()):
            found = self.ways.saving(self.need)
            if found is None:
                if self.took_least or self.best is not None:
                    return False
                self.took_least = True
                found = self.ways.least()
                if found is None:
                    return False
            if found.seconds >= self.below_s:
                return False
            if found.choice not in self.tried:
                self.latest = found
                return True
            self._move_on(self.tried[found.choice])
        return False

    def learn(self, memory: RankMemory, seconds: float) -> None:
        """Takes in what the latest choice takes when replayed, and the seconds it adds to a microbatch."""
        excess = memory.peak_bytes - self.limit
        self.tried[self.latest.choice] = excess
        if excess <= 0 and seconds < self.seconds:
            self.best, self.seconds = Proved(self.latest.choice, memory), seconds
        self._move_on(excess)

    def _is_close(self) -> bool:
        low, high = self.low, self.high
        return min(high.need - low.need, -high.excess) <= _CLOSE * high.need

    def _move_on(self, excess: int) -> None:
        """The next need to choose for, after one that left `excess` bytes too many, or fitted."""
        latest = Tried(self.need, excess)
        if excess <= 0:
            self.high = min(self.high, latest, key=lambda one: one.need)
        else:
            self.low, before = max(self.low, latest, key=lambda one: one.need), self.low
            if self.best is None:
                stuck = 2 * self.step if excess > before.excess / 2 else 0.0
                self.step = max(stuck, float(excess), _CLOSE * self.need)
                self.need += self.step
        if self.best is not None:
            self.need = self._between()

    def _between(self) -> float:
        """Where the excess would be nothing if it fell evenly from `low` to `high`."""
        low, high = self.low, self.high
        part = low.excess / (low.excess - high.excess)
        return low.need + min(max(part, _WITHIN), 1 - _WITHIN) * (high.need - low.need)


@dataclass(frozen=True)
class Tried:
    """A need that was chosen for, and the bytes the choice left too many."""

    need: float
    excess: float
