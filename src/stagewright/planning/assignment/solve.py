"""A good assignment for any number of units: all orders of a few, annealing and exact repairs of many."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Ints
from stagewright.planning.assignment.exact import best_of_all
from stagewright.planning.assignment.kernels import anneal, best_permutation, descend
from stagewright.planning.assignment.problem import Assignment, Grid

_ALL_ORDERS = 8
_STEPS_TIMES_UNITS, _FEWEST_STEPS = 40_000_000, 200_000
_DESCENT = 64
"""Units up to which every neighbour is looked at."""
_WINDOW = 6
"""Places that are exchanged in all ways at once."""
_HOT, _COLD = 0.05, 1e-5
"""First and last temperature as a part of the default's cost."""


def assign(
    grid: Grid,
    *,
    num_steps: int | None = None,
    num_starts: int = 8,
    num_exchanges: int | None = None,
    seed: int = 0,
) -> Assignment:
    """A good assignment, never worse than the default; the same for the same arguments.

    All orders are looked at for up to eight units. Otherwise simulated annealing with Pipette's five moves (reverse,
    insert, swap, move a part, move it reversed) shares `num_steps` among `num_starts`; then descent through all swaps,
    insertions and reversals, and `num_exchanges` of six places at a time in all ways, by default two for each unit
    and as many steps as take about half a second where units are nodes.
    """
    if grid.num_units <= _ALL_ORDERS:
        return best_of_all(grid)
    num_steps = num_steps or max(_FEWEST_STEPS, _STEPS_TIMES_UNITS // grid.num_units)
    by_default = grid.default
    first = grid.seconds(by_default)
    if grid.has_equal_links and np.ptp(grid.fill) == 0:
        return Assignment(tuple(by_default.tolist()), first, first, True, 1)  # all links and units are equal
    generator = np.random.default_rng(seed)
    exchanges = 2 * grid.num_units if num_exchanges is None else num_exchanges
    found: list[Ints] = [by_default]
    for index in range(num_starts):
        start = by_default if index == 0 else generator.permutation(by_default)
        steps = max(1, num_steps // num_starts)
        best = anneal(start, steps, _HOT * first, _COLD * first, seed + index, grid.terms)
        found.append(_repaired(grid, best, generator, exchanges))
    best = min(found, key=grid.seconds)
    return Assignment(tuple(best.tolist()), grid.seconds(best), first, False, num_steps)


def _repaired(grid: Grid, order: Ints, generator: np.random.Generator, num_exchanges: int) -> Ints:
    if grid.num_units > _DESCENT:
        return order
    order = descend(order, grid.terms)
    for _ in range(num_exchanges):
        places = generator.permutation(grid.num_units)[:_WINDOW].astype(np.int64)
        order = best_permutation(order, places, np.sort(order[places]), grid.terms)
    return descend(order, grid.terms)
