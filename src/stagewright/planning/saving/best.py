"""The choice a plan takes: the integer program's where a rank is small, else the greedy one."""

from __future__ import annotations

from stagewright.errors import PlanError
from stagewright.planning.saving.exact import choose_exactly
from stagewright.planning.saving.greedy import choose as choose_greedily
from stagewright.planning.saving.problem import Choice, Problem

MOST_UNITS = 100
"""Up to so many units the integer program takes about as long as the greedy choice, or less; with more it can take a second,
and the greedy choice is within a few hundredths of it."""

_TIME_LIMIT_S = 2.0
"""After so long the greedy choice is taken; problems of this size take a few tenths of a second at most."""


def choose(problem: Problem) -> Choice | None:
    """A choice that saves what is needed at the least time, or nearly that; None if there is none."""
    if len(problem.units) <= MOST_UNITS:
        try:
            return choose_exactly(problem, time_limit_s=_TIME_LIMIT_S)
        except PlanError:
            pass  # not solved in time
    return choose_greedily(problem)
