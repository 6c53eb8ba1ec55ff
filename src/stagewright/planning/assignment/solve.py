"""Rank assignment for any number of units: exhaustive search for few, annealing and local search for many."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Ints
from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import anneal, best_permutation, descend, exhaust
from stagewright.planning.assignment.problem import Assignment, AssignmentProblem

_ALL_ORDERS = 8
_MOST_ALL_ORDERS = 9
"""Maximum number of units for exhaustive search: nine have 362,880 orders."""
_STEPS_TIMES_UNITS, _FEWEST_STEPS = 40_000_000, 200_000
_DESCENT = 64
"""Maximum number of units for which every neighbour is tried."""
_WINDOW = 6
"""Number of places that are permuted in all ways at once."""
_HOT, _COLD = 0.05, 1e-5
"""First and last temperature as fractions of the default's cost."""


def assign(problem: AssignmentProblem, *, num_steps: int | None = None, num_starts: int = 8) -> Assignment:
    """Return a good assignment, never worse than the default; the same for the same arguments.

    For up to eight units all orders are tried. Otherwise simulated annealing with Pipette's five moves (reverse, insert,
    swap, move a part, move it reversed) divides `num_steps` among `num_starts`; then follow descent through all swaps,
    insertions and reversals, and two permutations per unit of six places in all ways. By default there are as many steps as
    take about half a second where units are nodes.
    """
    if problem.num_units <= _ALL_ORDERS:
        return best_of_all(problem)
    num_steps = num_steps or max(_FEWEST_STEPS, _STEPS_TIMES_UNITS // problem.num_units)
    by_default = problem.default
    first = problem.seconds(by_default)
    if problem.has_equal_links:
        return Assignment(tuple(by_default.tolist()), first, first, is_proved=True)
    generator = np.random.default_rng(0)
    orders: list[Ints] = [by_default]
    for index in range(num_starts):
        start = by_default if index == 0 else generator.permutation(by_default)
        steps = max(1, num_steps // num_starts)
        best = anneal(start, steps, _HOT * first, _COLD * first, index, problem.terms)
        orders.append(_repaired(problem, best, generator, 2 * problem.num_units))
    best = min(orders, key=problem.seconds)
    return Assignment(tuple(best.tolist()), problem.seconds(best), first, is_proved=False)


def best_of_all(problem: AssignmentProblem) -> Assignment:
    """Return the optimal assignment: the default where nothing is better, else the first in lexicographic order.

    Raises:
        InputError: too many units for exhaustive search.
    """
    size = problem.num_units
    if size > _MOST_ALL_ORDERS:
        raise InputError(
            f"{size} units have too many orders to try all: use at most {_MOST_ALL_ORDERS}, or assign()"
        )
    best = exhaust(np.arange(size, dtype=np.int64), problem.terms)
    least, by_default = problem.seconds(best), problem.seconds(problem.default)
    if least == by_default:
        best = problem.default
    return Assignment(tuple(best.tolist()), least, by_default, is_proved=True)


def _repaired(
    problem: AssignmentProblem, order: Ints, generator: np.random.Generator, num_exchanges: int
) -> Ints:
    if problem.num_units > _DESCENT:
        return order
    order = descend(order, problem.terms)
    for _ in range(num_exchanges):
        places = generator.permutation(problem.num_units)[:_WINDOW].astype(np.int64)
        order = best_permutation(order, places, np.sort(order[places]), problem.terms)
    return descend(order, problem.terms)
