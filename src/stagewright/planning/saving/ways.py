"""The state of a choice while it is being improved: which way every unit goes, and what changing it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from stagewright.planning.saving.problem import Choice, Problem


class Way(Enum):
    """What becomes of a unit."""

    KEEP = 0
    RECOMPUTE = 1
    OFFLOAD = 2


class Move(NamedTuple):
    """A unit going another way."""

    unit: int
    way: Way


class Ways:
    """The way of every unit, with how many units use each operator and how many bytes the link moves."""

    def __init__(self, problem: Problem, offloaded: Iterable[int] = ()) -> None:
        self.problem = problem
        self.way = [Way.KEEP] * len(problem.units)
        self.uses: Counter[int] = Counter()
        self.moved = 0
        self.missing = problem.needed
        self.recomputable = [index for index, unit in enumerate(problem.units) if unit.recomputable]
        for unit in offloaded:
            self.do(Move(unit, Way.OFFLOAD))

    @property
    def choice(self) -> Choice:
        ways = list(enumerate(self.way))
        return Choice(
            frozenset(unit for unit, way in ways if way is Way.RECOMPUTE),
            frozenset(unit for unit, way in ways if way is Way.OFFLOAD),
        )

    def cost(self, move: Move) -> float:
        """Seconds that a move adds."""
        old, size = self.way[move.unit], self.problem.units[move.unit].num_bytes
        if old is move.way:
            return 0.0
        chain, seconds = self.problem.units[move.unit].chain, self.problem.seconds
        total = 0.0
        if move.way is Way.RECOMPUTE:
            total += sum(seconds[node] for node in chain if not self.uses[node])
        elif old is Way.RECOMPUTE:
            total -= sum(seconds[node] for node in chain if self.uses[node] == 1)
        if Way.OFFLOAD in (old, move.way):
            after = self.moved + (size if move.way is Way.OFFLOAD else -size)
            total += self._link_seconds(after) - self._link_seconds(self.moved)
        return total

    def gives(self, move: Move) -> float:
        """Bytes that a move saves in addition."""
        return self._saved(move) - self._saved(Move(move.unit, self.way[move.unit]))

    def do(self, move: Move) -> None:
        old, unit = self.way[move.unit], self.problem.units[move.unit]
        self.missing -= self.gives(move)
        self.way[move.unit] = move.way
        if old is Way.RECOMPUTE:
            self.uses.subtract(unit.chain)
        if move.way is Way.RECOMPUTE:
            self.uses.update(unit.chain)
        self.moved += unit.num_bytes * ((move.way is Way.OFFLOAD) - (old is Way.OFFLOAD))

    def keeping(self) -> list[Move]:
        """Every unit that is not kept, kept."""
        return [Move(unit, Way.KEEP) for unit, way in enumerate(self.way) if way is not Way.KEEP]

    def changing(self) -> list[Move]:
        """Recomputed units offloaded, and offloaded ones recomputed."""
        if not self.problem.may_offload:
            return []
        found = [Move(u, Way.OFFLOAD) for u, way in enumerate(self.way) if way is Way.RECOMPUTE]
        back = [Move(u, Way.RECOMPUTE) for u in self.recomputable if self.way[u] is Way.OFFLOAD]
        return found + back

    def giving(self) -> list[Move]:
        """Moves that save bytes."""
        moves = [Move(unit, Way.RECOMPUTE) for unit in self.recomputable]
        if self.problem.may_offload:
            moves += [Move(unit, Way.OFFLOAD) for unit, way in enumerate(self.way) if way is Way.KEEP]
        return [move for move in moves if self.gives(move) > 0]

    def _saved(self, move: Move) -> float:
        match move.way:
            case Way.RECOMPUTE:
                return self.problem.saves(move.unit)
            case Way.OFFLOAD:
                return self.problem.parks(move.unit)
            case Way.KEEP:
                return 0.0

    def _link_seconds(self, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        return max(0.0, num_bytes * self.problem.link_s_per_byte - self.problem.free_s)
