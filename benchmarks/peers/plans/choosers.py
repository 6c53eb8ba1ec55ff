"""How other planners choose what a stage recomputes: a knapsack over values, and the end of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peers.plans.units import SavingProblem

_SLOTS = 2000
"""Parts into which memory is divided for the knapsack."""


def knapsack(problem: SavingProblem) -> list[int] | None:
    """The values whose keeping avoids most recomputation within the memory left, each by the time of its own chain.

    Source: AdaPipe (Sun et al., ASPLOS 2024), whose units are recomputed independently. A dynamic program over units and
    memory in parts of 1/2000, rounded up. Ignores: that chains share operators.

    >>> from peers.plans.units import Unit
    >>> units = tuple(Unit(0, f"op{i}", (i,), size, frozenset({i})) for i, size in enumerate((6, 5, 5)))
    >>> knapsack(SavingProblem(units, {0: 3.0, 1: 2.0, 2: 2.0}, 6.0, {0: 1.0}))
    [0]
    """
    able = [
        index for index, unit in enumerate(problem.units) if unit.recomputable and problem.saves(index) > 0
    ]
    sizes = np.array([problem.saves(index) for index in able])
    room = float(sizes.sum()) - problem.needed
    if room < 0:
        return None
    slots = np.ceil(sizes / max(room, 1.0) * _SLOTS).astype(int)
    values = [sum(problem.seconds[node] for node in problem.units[index].chain) for index in able]
    kept = _most_valuable(slots.tolist(), values, _SLOTS)
    return [index for place, index in enumerate(able) if place not in kept]


def _most_valuable(sizes: Sequence[int], values: Sequence[float], capacity: int) -> set[int]:
    """Indices of the most valuable items of at most `capacity` together."""
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(sizes), capacity + 1), np.bool_)
    for item, (size, value) in enumerate(zip(sizes, values, strict=True)):
        if size <= capacity:
            with_item = np.full(capacity + 1, -np.inf)
            with_item[size:] = best[: capacity + 1 - size] + value
            taken[item] = with_item > best
            best = np.maximum(best, with_item)
    found, left = set(), capacity
    for item in range(len(sizes) - 1, -1, -1):
        if taken[item, left]:
            found.add(item)
            left -= sizes[item]
    return found
