"""Timelines of plans and of programs."""

from __future__ import annotations

from typing import Any, overload

from stagewright.errors import InputError
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated
from stagewright.schedule import Program
from stagewright.simulation import StageCosts, Timeline
from stagewright.simulation import simulate as simulate_program


@overload
def simulate(subject: Plan) -> Timeline: ...
@overload
def simulate(subject: Program, costs: StageCosts, *args: Any, **options: Any) -> Timeline: ...
def simulate(subject: Plan | Program, *args: Any, **options: Any) -> Timeline:
    """When every action of a batch runs: of a plan by the costs that it states, of a program by those that are given, with
    the arguments of `stagewright.simulation.simulate`.

    Raises:
        InputError: the plan states no costs, or costs of another number of stages are given.
        ScheduleError: the program deadlocks.
    """
    if not isinstance(subject, Plan):
        return simulate_program(subject, *args, **options)
    if args or options:
        raise InputError(
            "a plan states its own costs: give nothing beside it, or its program with `stage_program(plan)`"
        )
    costs = subject.predictions.costs
    if costs is None:
        raise InputError(
            "the plan does not state what its actions take: `stagewright.estimate(plan, cluster)` is one that does"
        )
    return simulated(stage_program(subject), costs)
