"""The search for the choice of one rank that fits and adds least time, each candidate verified by replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stagewright.estimation.memory import RankMemory
from stagewright.planning.checkpointing.choice import SavingChoice
from stagewright.planning.checkpointing.proposals import Proposal, Propose

_CLOSE = 0.01
"""Relative difference of needs below which their choices are equally good."""

_WITHIN = 0.1
"""Minimum distance of the next need from the two around it, as a fraction of their difference."""


@dataclass(frozen=True)
class Proved:
    """A choice that fits, and its memory when replayed."""

    choice: SavingChoice
    memory: RankMemory


class RankSearch:
    """A search that raises the bytes a rank must save until a choice fits, then lowers them as long as one does.

    Choices that are predicted to add `below_s` or more to a microbatch are of no use, nor are those that save more.
    """

    def __init__(
        self, kept: RankMemory, limit: int, propose: Propose | None, below_s: float = math.inf
    ) -> None:
        self.rank = kept.rank
        self.limit = limit
        self.excess = kept.peak_bytes - limit
        self.best = Proved(SavingChoice(), kept) if self.excess <= 0 else None
        self.latest = Proposal(SavingChoice(), 0.0)
        self.seconds = math.inf if self.excess > 0 else 0.0
        self.proposals = propose
        self.below_s = below_s
        self.is_too_slow = self.lacks_memory = False
        """Why there is no choice: a proposal was of no use, or none was enough."""
        self.need = float(self.excess)
        self.low, self.high = Tried(0.95 * self.need, 0.05 * self.need), Tried(math.inf, -math.inf)
        self.step = 0.0
        self.tried: dict[SavingChoice, int] = {}
        self.took_least = False

    def propose(self) -> bool:
        """Set the next choice to replay; return whether there is one."""
        while self.proposals is not None and (self.best is None or not self._is_close()):
            proposal = self.proposals.saving(self.need)
            if proposal is None:
                if self.took_least or self.best is not None:
                    self.lacks_memory = self.best is None
                    return False
                self.took_least = True
                proposal = self.proposals.least()
                if proposal is None:
                    self.lacks_memory = True
                    return False
            if proposal.seconds >= self.below_s:
                self.is_too_slow = True
                return False
            if proposal.choice not in self.tried:
                self.latest = proposal
                return True
            self._move_on(self.tried[proposal.choice])
        return False

    def learn(self, memory: RankMemory, seconds: float) -> None:
        """Record the memory of the latest choice when replayed, and the seconds it adds to a microbatch."""
        excess = memory.peak_bytes - self.limit
        self.tried[self.latest.choice] = excess
        if excess <= 0 and seconds < self.seconds:
            self.best, self.seconds = Proved(self.latest.choice, memory), seconds
        self._move_on(excess)

    def _is_close(self) -> bool:
        low, high = self.low, self.high
        return min(high.need - low.need, -high.excess) <= _CLOSE * high.need

    def _move_on(self, excess: int) -> None:
        """Set the next need, after one whose choice was over by `excess` bytes, or fitted."""
        latest = Tried(self.need, excess)
        if excess <= 0:
            self.high = min(self.high, latest, key=lambda tried: tried.need)
        else:
            self.low, before = max(self.low, latest, key=lambda tried: tried.need), self.low
            if self.best is None:
                stuck = 2 * self.step if excess > before.excess / 2 else 0.0
                self.step = max(stuck, float(excess), _CLOSE * self.need)
                self.need += self.step
        if self.best is not None:
            self.need = self._between()

    def _between(self) -> float:
        """Return the need at which the excess would be zero if it fell linearly from `low` to `high`."""
        low, high = self.low, self.high
        part = low.excess / (low.excess - high.excess)
        return low.need + min(max(part, _WITHIN), 1 - _WITHIN) * (high.need - low.need)


@dataclass(frozen=True)
class Tried:
    """A need that was tried, and the bytes by which its choice was over."""

    need: float
    excess: float
