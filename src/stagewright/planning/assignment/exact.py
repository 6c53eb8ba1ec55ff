"""The best assignment by looking at all of them."""

from __future__ import annotations

import math

import numpy as np

from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import exhaust
from stagewright.planning.assignment.problem import Assignment, Grid

LARGEST = 9
"""Units of which all orders are looked at: 362,880 of nine."""


def best_of_all(grid: Grid) -> Assignment:
    """The optimum: the default where nothing is better, else the first in lexicographic order.

    Raises:
        InputError: too many units to look at all orders.
    """
    size = grid.num_units
    if size > LARGEST:
        raise InputError(
            f"{size} units have too many orders to look at all: use at most {LARGEST}, or assign()"
        )
    in_order = np.arange(size, dtype=np.int64)
    best = exhaust(in_order.copy(), grid.terms)
    least, by_default = grid.seconds(best), grid.seconds(grid.default)
    if least == by_default:
        best = grid.default
    return Assignment(tuple(best.tolist()), least, by_default, True, math.factorial(size))
