"""The best choice by an integer program: what plans take for small ranks, and what the greedy choice is measured against."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import PlanError
from stagewright.planning.saving.problem import Choice, Problem, groups

MAX_UNITS = 600
"""More units than this take the solver long."""

_TIE = 1e-4
"""What moving everything costs in itself, of the longest group's time."""

_OPTIMAL, _OVER_THE_LIMIT, _INFEASIBLE = 0, 1, 2
"""Outcomes of `scipy.optimize.milp`."""

_OUTPUT = threading.Lock()
"""Held by the thread that has standard output, which is the process', closed off."""


def choose_exactly(problem: Problem, *, max_nodes: int = 100_000) -> Choice | None:
    """The choice of least added time, or None if none saves enough.

    One binary variable per unit and way, one continuous variable per group of operators that the same units need, which is
    at least as large as each of them; solved by HiGHS.

    Raises:
        PlanError: more than `MAX_UNITS` units, or no proven optimum after `max_nodes` nodes of the search tree: a limit of
            work and not of seconds, so that one problem has one result.
    """
    if problem.needed <= 0:
        return Choice()
    if len(problem.units) > MAX_UNITS:
        raise PlanError(
            f"an exact choice among {len(problem.units)} saved values takes too long: use the greedy one, or a "
            f"stage of at most {MAX_UNITS}"
        )
    return _Program(problem).solved(max_nodes)


@contextmanager
def _muted() -> Iterator[None]:
    """Keeps off standard output what the solver's own code prints there, whatever its options say, into documents too."""
    with _OUTPUT:
        kept = None
        with suppress(OSError):
            kept = os.dup(1)
        if kept is None:  # closed: there is nothing to keep anything off
            yield
            return
        flush = ctypes.CDLL(None).fflush
        flush(None)
        try:
            with open(os.devnull, "wb", buffering=0) as nowhere:
                os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)


class _Program:
    """Columns: recompute per unit, offload per unit, group of operators, overhead of the link."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = groups(problem)
        self.count = len(problem.units)
        self.size = 2 * self.count + len(self.groups) + 1
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        longest = max([seconds for _, seconds in self.groups], default=0.0)
        self.scale = 1.0 / longest if longest > 0 else 1e3

    def solved(self, max_nodes: int) -> Choice | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        self._constrain()
        binary = np.zeros(self.size)
        binary[: 2 * self.count] = 1
        matrix, low, high = self._matrix()
        constraints = LinearConstraint(matrix, low, high)  # pyright: ignore[reportArgumentType]
        bounds = Bounds(np.zeros(self.size), self._upper())  # pyright: ignore[reportArgumentType]
        for presolve in (
            True,
            False,
        ):  # what presolving leaves is at times beyond the solver, the whole is not
            options = {"node_limit": max_nodes, "mip_rel_gap": 1e-6, "presolve": presolve}
            with _muted():
                result = milp(
                    self._costs(), constraints=constraints, integrality=binary, bounds=bounds, options=options
                )
            if result.status == _INFEASIBLE:
                return None
            if result.status == _OPTIMAL and result.x is not None:
                return self._choice(result.x)
            max_nodes -= result.get("mip_node_count") or 0
            if result.status == _OVER_THE_LIMIT or max_nodes <= 0:
                break
        raise PlanError(f"the integer program was not solved ({result.message}): use the greedy choice")

    def _choice(self, columns: NDArray[np.float64]) -> Choice:
        """What the first columns, one per unit and way, choose."""
        chosen = np.flatnonzero(columns[: 2 * self.count] > 0.5).tolist()
        recomputed = frozenset(index for index in chosen if index < self.count)
        return Choice(recomputed, frozenset(index - self.count for index in chosen if index >= self.count))

    def _constrain(self) -> None:
        problem, count = self.problem, self.count
        saved = [*map(problem.saves, range(count)), *map(problem.parks, range(count))]
        scale = max(1.0, problem.needed)
        self._row(list(range(2 * count)), [num_bytes / scale for num_bytes in saved], problem.needed / scale)
        for unit in range(count):
            self._row([unit, count + unit], [-1.0, -1.0], -1.0)
        for group, (users, _) in enumerate(self.groups):
            for unit in users:
                self._row([2 * count + group, unit], [1.0, -1.0], 0.0)
        if problem.may_offload:
            moved = [-unit.num_bytes * problem.link_s_per_byte * self.scale for unit in problem.units]
            columns = [self.size - 1, *range(count, 2 * count)]
            self._row(columns, [1.0, *moved], -problem.free_s * self.scale)

    def _row(self, columns: list[int], factors: Sequence[float], at_least: float) -> None:
        self.rows.append((columns, list(factors), at_least, np.inf))

    def _matrix(self) -> tuple[Any, list[float], list[float]]:
        from scipy.sparse import csr_array

        lengths = np.cumsum([0, *(len(columns) for columns, *_ in self.rows)])
        columns = np.concatenate([row[0] for row in self.rows])
        factors = np.concatenate([row[1] for row in self.rows])
        matrix = csr_array((factors, columns, lengths), shape=(len(self.rows), self.size))
        return matrix, [row[2] for row in self.rows], [row[3] for row in self.rows]

    def _costs(self) -> list[float]:
        """Parts of the longest group's time, so that the solver's tolerances are far below them; of choices that take
        equally long, the one that moves the fewest bytes."""
        whole = sum(unit.num_bytes for unit in self.problem.units) or 1
        moved = [_TIE * unit.num_bytes / whole for unit in self.problem.units]
        return [*([0.0] * self.count), *moved, *(seconds * self.scale for _, seconds in self.groups), 1.0]

    def _upper(self) -> list[float]:
        recompute = [float(unit.recomputable) for unit in self.problem.units]
        offload = [float(self.problem.may_offload)] * self.count
        return [*recompute, *offload, *([1.0] * len(self.groups)), np.inf]
