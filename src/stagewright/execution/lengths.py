"""Batches of several lengths: a runner for each, one of them at work, all on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.execution.rank_runner import RankRunner
from stagewright.graph import OperatorGraph


@dataclass(frozen=True)
class AtLength:
    """The traced model for samples of one length, and this rank's runner of its stages."""

    graph: OperatorGraph
    runner: RankRunner


class Lengths:
    """The runner at work and those that are released; runners are made when their length is first asked for.

    What a runner computes from constants and parameters is dropped while another works: at any time there are the bytes
    of one length alone.
    """

    def __init__(self, longest: int, first: AtLength, make: Callable[[int], AtLength]) -> None:
        self._make = make
        self._made = {longest: first}
        self.now = first

    def turn_to(self, length: int) -> AtLength:
        """The runner for `length`, ready for a batch."""
        if length not in self._made:
            self.now.runner.release()
            self._made[length] = self._make(length)
        elif self._made[length] is not self.now:
            self.now.runner.release()
            self._made[length].runner.restore()
        self.now = self._made[length]
        return self.now

    def scale_loss(self, cotangent: float) -> None:
        """Start backwards at every length from another cotangent of each microbatch's loss."""
        for one in self._made.values():
            one.runner.scale_loss(cotangent)
        for one in self._made.values():
            if one is not self.now:
                one.runner.release()

    def graph_of(self, length: int) -> OperatorGraph | None:
        """The model for samples of a length, if it was traced before."""
        made = self._made.get(length)
        return None if made is None else made.graph

    @property
    def runners(self) -> list[RankRunner]:
        """Those that were made."""
        return [one.runner for one in self._made.values()]

    @property
    def num_bytes_sent(self) -> int:
        return sum(one.runner.transport.num_bytes_sent for one in self._made.values())
