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
    """Return when every action of a batch runs: for a plan with the costs that it states, for a program with the given
    ones and the other arguments of `stagewright.simulation.simulate`.

    Raises:
        InputError: the plan states no costs, or costs of another number of stages are given.
        ScheduleError: the program deadlocks.
    """
    if not isinstance(subject, Plan):
        return simulate_program(subject, *args, **options)
    if args or options:
        raise InputError(
            "a plan states its own costs: give no other argument, or pass its program, `stage_program(plan)`"
        )
    costs = subject.predictions.costs
    if costs is None:
        raise InputError(
            "the plan does not state its costs: `stagewright.estimate(plan, cluster)` returns one that does"
        )
    return simulated(stage_program(subject), costs)
