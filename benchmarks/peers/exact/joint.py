"""The true optimum of small problems, by constraint programming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stagewright.errors import PlanError
from stagewright.planning.joint.problem import JointProblem
from stagewright.schedule.list_scheduler.terms import FORWARD, INPUT_GRAD, WEIGHT_GRAD

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

_MOST_OPERATIONS = 600
_PASSES = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)


@dataclass(frozen=True)
class Optimum:
    """No plan is shorter than `lower_s`, and one takes `upper_s`; equal when `is_proven`."""

    lower_s: float
    upper_s: float
    is_proven: bool
    rank_of_layer: tuple[int, ...]


def optimum(
    problem: JointProblem, time_limit_s: float = 30.0, *, at_most_s: float | None = None, num_workers: int = 2
) -> Optimum:
    """The shortest makespan over all partitions, placements and schedules of a problem in whole seconds.

    Every layer may be a stage of its own: without an overhead per computation that only adds schedules. So a
    partition and placement is a rank for every layer. Microbatches run in order in every pass of a layer,
    which loses nothing because they are alike. Give `at_most_s`, the makespan of a known plan, to search
    below it only.

    Raises:
        PlanError: a problem that is too large, has an overhead, or costs that are not whole.
    """
    from ortools.sat.python import cp_model

    _check(problem)
    model = cp_model.CpModel()
    built = _Model(problem, model, _horizon(problem) if at_most_s is None else int(np.ceil(at_most_s)))
    model.minimize(built.makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if status == cp_model.INFEASIBLE:
            raise PlanError("no plan fits the memory of the ranks or the makespan asked for")
        return Optimum(float(solver.best_objective_bound), float("inf"), False, ())
    ranks = tuple(next(rank for rank, lies in enumerate(row) if solver.value(lies)) for row in built.lies_on)
    return Optimum(
        float(solver.best_objective_bound), solver.objective_value, status == cp_model.OPTIMAL, ranks
    )


class _Model:
    """Variables and constraints of the problem."""

    def __init__(self, problem: JointProblem, model: CpModel, horizon: int) -> None:
        self.problem, self.model, self.horizon = problem, model, horizon
        layers, M = problem.layers.num_layers, problem.num_microbatches
        self.makespan = model.new_int_var(0, horizon, "makespan")
        self.lies_on = [
            [model.new_bool_var(f"x{layer}_{rank}") for rank in range(problem.num_ranks)]
            for layer in range(layers)
        ]
        self.start = {
            (kind, layer, m): model.new_int_var(0, horizon, f"s{kind}_{layer}_{m}")
            for kind in _PASSES
            for layer in range(layers)
            for m in range(M)
        }
        self.seconds = {
            (kind, layer): self._duration(column, layer)
            for kind, column in enumerate(
                (problem.layers.forward_s, problem.layers.input_grad_s, problem.layers.weight_grad_s)
            )
            for layer in range(layers)
        }
        self._place()
        self._order()
        self._exclude()
        if np.isfinite(problem.memory_bytes).all():
            self._limit_memory()

    def _duration(self, column: np.ndarray, layer: int) -> list[int]:
        """Seconds on each rank."""
        return [round(float(column[layer] / speed)) for speed in self.problem.speed]

    def _end(self, kind: int, layer: int, m: int):
        """When an operation ends, on whichever rank it runs."""
        on_rank = zip(self.lies_on[layer], self.seconds[kind, layer], strict=True)
        return self.start[kind, layer, m] + sum(lies * seconds for lies, seconds in on_rank)

    def _place(self) -> None:
        """A rank for every layer, none empty; equal ranks numbered in the order of their first layers."""
        model, lies_on = self.model, self.lies_on
        for row in lies_on:
            model.add_exactly_one(row)
        for rank in range(self.problem.num_ranks):
            model.add_at_least_one(row[rank] for row in lies_on)
        alike = len(set(self.problem.speed)) == len(set(self.problem.memory_bytes)) == 1
        for layer, row in enumerate(lies_on if alike else []):
            for rank in range(1, self.problem.num_ranks):
                model.add(row[rank] <= sum(before[rank - 1] for before in lies_on[:layer]))

    def _order(self) -> None:
        """What waits for what."""
        layers, M = self.problem.layers.num_layers, self.problem.num_microbatches
        for m in range(M):
            for layer in range(layers):
                if layer:
                    hop = self._hop(layer)
                    self.model.add(self.start[FORWARD, layer, m] >= self._end(FORWARD, layer - 1, m) + hop)
                    self.model.add(
                        self.start[INPUT_GRAD, layer - 1, m] >= self._end(INPUT_GRAD, layer, m) + hop
                    )
                self.model.add(self.start[WEIGHT_GRAD, layer, m] >= self._end(INPUT_GRAD, layer, m))
                self.model.add(self.makespan >= self._end(WEIGHT_GRAD, layer, m))
                for kind in _PASSES if m else ():
                    self.model.add(self.start[kind, layer, m] >= self._end(kind, layer, m - 1))
            last = layers - 1
            self.model.add(self.start[INPUT_GRAD, last, m] >= self._end(FORWARD, last, m))

    def _hop(self, layer: int) -> IntVar | int:
        """Seconds of the transfer into `layer`: none from the same rank."""
        seconds = round(float(self.problem.transfer_s[layer]))
        if not seconds:
            return 0
        hop = self.model.new_int_var(0, seconds, f"hop{layer}")
        for before, here in zip(self.lies_on[layer - 1], self.lies_on[layer], strict=True):
            self.model.add(hop >= seconds * (here - before))
        return hop

    def _exclude(self) -> None:
        """One operation at a time on a rank."""
        for rank in range(self.problem.num_ranks):
            intervals = [
                self.model.new_optional_fixed_size_interval_var(
                    start, self.seconds[kind, layer][rank], self.lies_on[layer][rank], f"i{rank}_{kind}_{layer}_{m}"
                )
                for (kind, layer, m), start in self.start.items()
            ]  # fmt: skip
            self.model.add_no_overlap(intervals)

    def _limit_memory(self) -> None:
        """What microbatches keep on a rank, from the start of a forward to the end of a gradient."""
        layers = self.problem.layers
        for rank in range(self.problem.num_ranks):
            intervals, demands = [], []
            for layer in range(layers.num_layers):
                held = round(float(layers.held_bytes[layer]))
                freed = round(float(layers.saved_bytes[layer])) - held
                for m in range(self.problem.num_microbatches):
                    for until, demand in ((INPUT_GRAD, freed), (WEIGHT_GRAD, held)):
                        intervals.append(self._kept(layer, m, until, rank))
                        demands.append(demand)
                intervals.append(
                    self.model.new_optional_fixed_size_interval_var(
                        0, self.horizon, self.lies_on[layer][rank], f"p{rank}_{layer}"
                    )
                )
                demands.append(round(float(layers.parameter_bytes[layer])))
            self.model.add_cumulative(intervals, demands, int(self.problem.memory_bytes[rank]))

    def _kept(self, layer: int, m: int, until: int, rank: int):
        size = self.model.new_int_var(0, self.horizon, "")
        start = self.start[FORWARD, layer, m]
        end = self.start[until, layer, m] + self.seconds[until, layer][rank]
        return self.model.new_optional_interval_var(start, size, end, self.lies_on[layer][rank], "")


def _check(problem: JointProblem) -> None:
    layers = problem.layers
    operations = 3 * layers.num_layers * problem.num_microbatches
    if operations > _MOST_OPERATIONS:
        raise PlanError(
            f"the optimum of {operations} operations would take too long: at most {_MOST_OPERATIONS}, "
            "with fewer layers or microbatches"
        )
    columns = [layers.forward_s, layers.input_grad_s, layers.weight_grad_s]
    figures = np.concatenate(
        [*(np.outer(column, 1 / problem.speed).ravel() for column in columns), problem.transfer_s]
    )
    if problem.overhead_s or not np.allclose(figures, np.rint(figures)):
        raise PlanError(
            "the optimum is found for whole seconds on every rank and no overhead: scale the costs"
        )


def _horizon(problem: JointProblem) -> int:
    """Everything in a row."""
    work = problem.num_microbatches * problem.layers.seconds.sum() / problem.speed.min()
    return int(np.ceil(work + 2 * problem.num_microbatches * problem.transfer_s.sum()))
