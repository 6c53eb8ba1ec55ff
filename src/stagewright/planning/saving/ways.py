"""The state of a choice while it is being improved: which way every unit goes, and what changing it costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.planning.saving.problem import Choice, Problem, groups

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KEEP, RECOMPUTE, OFFLOAD = range(3)


class Ways:
    """The way of every unit: `KEEP`, `RECOMPUTE` or `OFFLOAD`.

    A move is a unit going another way, numbered ``way * num_units + unit``; `costs` and `gives` have an entry for each.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.size = size = len(problem.units)
        shared = groups(problem)
        self.seconds = np.array([seconds for _, seconds in shared])
        self.chains = np.zeros((size, len(shared)))
        for group, (users, _) in enumerate(shared):
            self.chains[list(users), group] = 1.0
        self.bytes = np.array([unit.num_bytes for unit in problem.units], np.float64)
        saved = [[0.0] * size, list(map(problem.saves, range(size))), list(map(problem.parks, range(size)))]
        self.saved = np.array(saved).reshape(3, size)
        self.allowed = self.saved > 0
        self.allowed[KEEP] = True
        self.allowed[RECOMPUTE] &= np.array([unit.recomputable for unit in problem.units], np.bool_)
        self.allowed[OFFLOAD] &= problem.may_offload
        self.way = np.zeros(size, np.int64)
        self.uses = np.zeros(len(shared))
        self.moved = 0.0
        self.missing = problem.needed

    @property
    def choice(self) -> Choice:
        recomputed, offloaded = (
            frozenset(np.flatnonzero(self.way == way).tolist()) for way in (RECOMPUTE, OFFLOAD)
        )
        return Choice(recomputed, offloaded)

    @property
    def total_seconds(self) -> float:
        return float(self.seconds[self.uses > 0].sum()) + float(self.link_seconds(np.array(0.0)))

    def restore(self, way: Ints) -> None:
        """Every unit the way it was."""
        for unit in np.flatnonzero(way != self.way).tolist():
            self.do(int(way[unit]) * self.size + unit)

    def do(self, move: int) -> None:
        way, unit = divmod(move, self.size)
        old = int(self.way[unit])
        self.uses += self.chains[unit] * ((way == RECOMPUTE) - (old == RECOMPUTE))
        self.moved += self.bytes[unit] * ((way == OFFLOAD) - (old == OFFLOAD))
        self.missing -= self.saved[way, unit] - self.saved[old, unit]
        self.way[unit] = way

    def do_all(self, moves: Sequence[int]) -> None:
        for move in moves:
            self.do(move)

    def unit(self, move: int) -> int:
        return move % self.size

    def gives(self) -> Floats:
        """Bytes that every move saves in addition."""
        return (self.saved - self.saved[self.way, np.arange(self.size)]).ravel()

    def is_move(self) -> NDArray[np.bool_]:
        """Whether every move is allowed and changes something."""
        return (self.allowed & (self.way != np.arange(3)[:, None])).ravel()

    def chain_costs(self) -> Floats:
        """Seconds of computation that every move adds; what offloading adds is in `link_seconds`."""
        adds = self.chains @ (self.seconds * (self.uses == 0))
        frees = self.chains @ (self.seconds * (self.uses == 1))
        recomputed = self.way == RECOMPUTE
        costs = np.where(recomputed, -frees, 0.0)
        return np.stack([costs, np.where(recomputed, 0.0, adds), costs]).ravel()

    def moved_bytes(self) -> Floats:
        """Bytes that every move has the link move in addition."""
        now = np.where(self.way == OFFLOAD, self.bytes, 0.0)
        return np.stack([-now, -now, self.bytes - now]).ravel()

    def link_seconds(self, more_bytes: Floats) -> Floats:
        """Time the link takes in excess of what is free with so many more bytes."""
        if not self.problem.may_offload:
            return np.zeros_like(more_bytes)
        total = self.moved + more_bytes
        taken = total * self.problem.link_s_per_byte - self.problem.free_s
        return np.where(total > 0.5, np.maximum(taken, 0.0), 0.0)

    def costs(self) -> Floats:
        """Seconds that every move adds."""
        now = self.link_seconds(np.array(0.0))
        return self.chain_costs() + self.link_seconds(self.moved_bytes()) - now
