"""Batches of several sequence lengths: a runner for each length, one of them active, all on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.execution.rank_runner import RankRunner
from stagewright.graph import OperatorGraph


@dataclass(frozen=True)
class AtLength:
    """The model traced for one sequence length, and this rank's runner of its stages."""

    graph: OperatorGraph
    runner: RankRunner


class RunnersByLength:
    """The runners of a rank by sequence length, one active and the others released; a runner is created at the first use of
    its length.

    Values that a runner computes from constants and parameters are dropped while another is active, so that only the bytes
    of one length are in use at any time.
    """

    def __init__(self, longest: int, first: AtLength, make: Callable[[int], AtLength]) -> None:
        self._make = make
        self._by_length = {longest: first}
        self.now = first

    def turn_to(self, length: int) -> AtLength:
        """Activate the runner for `length` and return it, ready for a batch."""
        if length not in self._by_length:
            self.now.runner.release()
            self._by_length[length] = self._make(length)
        elif self._by_length[length] is not self.now:
            self.now.runner.release()
            self._by_length[length].runner.restore()
        self.now = self._by_length[length]
        return self.now

    def scale_loss(self, cotangent: float) -> None:
        """Set the cotangent of each microbatch's loss from which backwards start, at every length."""
        for at_length in self._by_length.values():
            at_length.runner.scale_loss(cotangent)
        for at_length in self._by_length.values():
            if at_length is not self.now:
                at_length.runner.release()

    def graph_of(self, length: int) -> OperatorGraph | None:
        """Return the model traced for a sequence length, if it was traced before."""
        at_length = self._by_length.get(length)
        return None if at_length is None else at_length.graph

    @property
    def runners(self) -> list[RankRunner]:
        """All runners created so far."""
        return [at_length.runner for at_length in self._by_length.values()]

    @property
    def num_bytes_sent(self) -> int:
        return sum(at_length.runner.transport.num_bytes_sent for at_length in self._by_length.values())
