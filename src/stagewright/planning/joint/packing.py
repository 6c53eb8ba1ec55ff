"""A lower bound from the fact that layers cannot be divided: the best packing of layers into ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.planning.joint.problem import Problem

_RESOLUTION = 1 << 22
_MOST_VARIABLES = 400


def packing_bound(problem: Problem, effort: float = 1.0) -> float:
    """The least time in which whole layers can be packed into ranks, each rank starting when it may.

    Sort the ranks by their first layer. The j-th starts no earlier than after the forwards of the first j
    layers, and then does all work of its own layers, so ``T >= (sum_{k<j} f_k + M sum_{l on j} c_l) / v`` for
    every j. The bound is the minimum over all assignments of layers, found as a whole-number program in
    which layers of equal cost are one variable per rank; a program that is not solved in time still gives
    the bound its solver has proven. Costs are rounded down. With too many distinct layers for the
    program, of the ``k P + 1`` longest layers some rank has ``k + 1`` (for every k).
    """
    seconds = problem.num_microbatches * problem.layers.seconds / problem.speed.max()
    starts = np.cumsum(problem.layers.forward_s) - problem.layers.forward_s
    starts = starts[: problem.num_ranks] / problem.speed.max()
    simple = pigeonhole(seconds.tolist(), problem.num_ranks)
    kinds = len(np.unique(_rounded(seconds, float(seconds.sum()))))
    if kinds * problem.num_ranks > _MOST_VARIABLES or problem.num_ranks == 1:
        return simple
    return max(simple, _program(seconds, starts, problem.num_ranks, effort))


def pigeonhole(seconds: Sequence[float], num_ranks: int) -> float:
    """Of the ``k P + 1`` longest layers some rank has ``k + 1``, at least the shortest of them.

    >>> pigeonhole([3, 3, 2, 2, 1], 2)
    5
    """
    longest = sorted(seconds, reverse=True)
    best = 0.0
    for k in range((len(longest) - 1) // num_ranks + 1):
        top = longest[: k * num_ranks + 1]
        best = max(best, sum(top[-(k + 1) :]))
    return best


def _rounded(values: np.ndarray, total: float) -> np.ndarray:
    """Whole numbers of which `total` has some millions, rounded down."""
    return np.floor(values / total * _RESOLUTION).astype(np.int64)


def _program(seconds: np.ndarray, starts: np.ndarray, num_ranks: int, effort: float) -> float:
    from ortools.sat.python import cp_model  # half a second to import

    total = float(seconds.sum())
    costs, counts = np.unique(_rounded(seconds, total), return_counts=True)
    model = cp_model.CpModel()
    longest = model.new_int_var(0, 2 * _RESOLUTION, "longest")
    number = [
        [model.new_int_var(0, int(count), f"n{kind}_{rank}") for rank in range(num_ranks)]
        for kind, count in enumerate(counts)
    ]
    for kind, count in enumerate(counts):
        model.add(sum(number[kind]) == int(count))
    for rank, start in enumerate(_rounded(starts, total)):
        load = sum(int(cost) * number[kind][rank] for kind, cost in enumerate(costs))
        model.add(longest >= load + int(start))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort  # about seconds, but the same on every machine
    solver.parameters.num_workers = 1
    solver.solve(model)
    return max(0.0, float(solver.best_objective_bound)) / _RESOLUTION * total
