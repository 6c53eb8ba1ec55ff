"""The best rank assignment by exhaustive search."""

from __future__ import annotations

import math

import numpy as np

from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import exhaust
from stagewright.planning.assignment.problem import Assignment, AssignmentProblem

LARGEST = 9
"""Maximum number of units for exhaustive search: nine have 362,880 orders."""


def best_of_all(problem: AssignmentProblem) -> Assignment:
    """Return the optimal assignment: the default where nothing is better, else the first in lexicographic order.

    Raises:
        InputError: too many units for exhaustive search.
    """
    size = problem.num_units
    if size > LARGEST:
        raise InputError(f"{size} units have too many orders to try all: use at most {LARGEST}, or assign()")
    in_order = np.arange(size, dtype=np.int64)
    best = exhaust(in_order.copy(), problem.terms)
    least, by_default = problem.seconds(best), problem.seconds(problem.default)
    if least == by_default:
        best = problem.default
    return Assignment(tuple(best.tolist()), least, by_default, True, math.factorial(size))
