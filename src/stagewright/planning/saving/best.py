"""The choice a plan takes: the integer program's where a rank is small, else the greedy one."""

from __future__ import annotations

from stagewright.errors import PlanError
from stagewright.planning.saving.exact import choose_exactly
from stagewright.planning.saving.greedy import choose as choose_greedily
from stagewright.planning.saving.problem import Choice, Problem

MOST_UNITS = 100
"""Up to so many units the integer program takes about as long as the greedy choice, or less; with more it can take a second,
and the greedy choice is within a few hundredths of it."""

_MAX_NODES = 2_000
"""Of the search tree: after so many the greedy choice is taken. Problems of this size take 105 at most on seeds 2 and 3 of
`benchmarks/saving.py`, a tenth of a second. Not a limit of seconds: a plan must not depend on how busy the machine is."""


def choose(problem: Problem) -> Choice | None:
    """A choice that saves what is needed at the least time, or nearly that; None if there is none."""
    if len(problem.units) <= MOST_UNITS:
        try:
            return choose_exactly(problem, max_nodes=_MAX_NODES)
        except PlanError:
            pass  # not solved within the limit
    return choose_greedily(problem)
