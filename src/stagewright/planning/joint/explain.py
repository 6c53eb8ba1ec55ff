"""Why a plan is good: what each decision contributes, and what errors in the costs do to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.planning.joint.baselines import even_1f1b
from stagewright.planning.joint.layout import hops, stage_costs
from stagewright.planning.joint.plan import JointPlan, judged, scheduled
from stagewright.planning.joint.policy import ADAPTIS, Policy
from stagewright.planning.joint.problem import Problem
from stagewright.planning.joint.search import Found
from stagewright.planning.joint.starts import balanced
from stagewright.schedule import build
from stagewright.schedule.list_scheduler.terms import Floats
from stagewright.schedule.placement import linear
from stagewright.simulation import simulate

FUSED = ADAPTIS._replace(backlog=0, holds_back=False)
"""Every weight gradient right behind its input gradient, as frameworks run a backward."""


@dataclass(frozen=True)
class Step:
    """A decision added to the ones before it, the makespan then, and whether that would fit the memory."""

    decision: str
    makespan_s: float
    fits: bool = True

    @classmethod
    def of(cls, decision: str, plan: JointPlan) -> Step:
        """The step that ends at `plan`."""
        return cls(decision, plan.makespan_s, plan.fits)


def ablation(found: Found) -> tuple[Step, ...]:
    """From 1F1B on even stages to the best plan, one decision at a time.

    First the partition: stages of equal time, one per rank, still 1F1B. Then the placement: the stages and
    ranks of the best plan, each rank taking what is ready with its backwards in one piece. Then the
    schedule: the best plan itself, weight gradients apart. A step may lose time that the next one needs
    it for.
    """
    problem, best = found.best.problem, found.best
    steps = [Step.of("even 1F1B", even_1f1b(problem))]
    placement = linear(problem.num_ranks)
    layout = balanced(problem, placement)
    if layout is not None:
        program = build("1f1b", problem.num_ranks, problem.num_microbatches)
        steps.append(Step.of("partition", judged("balanced", problem, layout, program)))
    placed = scheduled("placed", problem, best.layout, Policy.of(FUSED, problem.layers.num_layers))
    if placed is not None:
        steps.append(Step.of("placement", placed))
    return (*steps, Step.of("schedule", best))


@dataclass(frozen=True)
class Sensitivity:
    """What the plan takes when every layer's costs are wrong by up to `error`: makespans over the planned one,
    on average and at worst, and the worst ratio to even 1F1B under the same costs."""

    error: float
    mean: float
    worst: float
    worst_to_even: float


def scenarios(problem: Problem, error: float, count: int, seed: int = 0) -> list[Problem]:
    """The problem with the costs of every layer off by factors between ``1 - error`` and ``1 + error``."""
    rng = np.random.default_rng(seed)
    factors = rng.uniform(1 - error, 1 + error, (count, problem.layers.num_layers))
    return [problem.scaled(row) for row in factors]


def under(plan: JointPlan, problem: Problem) -> float:
    """Makespan of the program of `plan` when the costs are those of `problem`."""
    costs = stage_costs(problem, plan.layout)
    timeline = simulate(plan.encoded, costs, hops(problem, plan.layout), action_overhead_s=problem.overhead_s)
    return timeline.makespan_s


def sensitivity(
    plan: JointPlan, errors: Sequence[float] = (0.05, 0.1, 0.2), count: int = 20, seed: int = 0
) -> tuple[Sensitivity, ...]:
    """The plan under random errors of its costs."""
    even = even_1f1b(plan.problem)
    found = []
    for error in errors:
        others = scenarios(plan.problem, error, count, seed)
        ours = np.array([under(plan, other) for other in others])
        theirs = np.array([under(even, other) for other in others])
        ratio = ours / plan.makespan_s
        found.append(
            Sensitivity(error, float(ratio.mean()), float(ratio.max()), float((ours / theirs).max()))
        )
    return tuple(found)


def worst_case(plan: JointPlan, error: float, count: int = 20, seed: int = 0) -> Floats:
    """Makespans of the plan in every scenario."""
    return np.array([under(plan, other) for other in scenarios(plan.problem, error, count, seed)])


def most_robust(found: Found, error: float, count: int = 20, seed: int = 0) -> JointPlan:
    """Of the best plan, its runners-up and the baselines that fit, the one whose longest makespan over random
    errors of the costs is shortest."""
    return min(
        (found.best, *found.runners_up),
        key=lambda plan: float(worst_case(plan, error, count, seed).max()),
    )


def observed_speeds(plan: JointPlan, busy_s: Sequence[float] | Floats) -> Floats:
    """The speeds of the ranks for which the plan would have been as busy as a run measured.

    A rank that took twice its planned seconds has half its speed. Plan again with the result.
    """
    return plan.problem.speed * plan.timeline.busy_s / np.asarray(busy_s, np.float64)


def relative_speeds(planned_s: Sequence[float], measured_s: Sequence[float]) -> Floats:
    """The speed of every rank beside that of the median rank, from the busy seconds that were planned for it and those
    that a run measured: what all ranks are slower by is an error of the plan's, not of a rank.

    >>> relative_speeds([1, 2, 2], [1.1, 2.2, 4.4]).round(6).tolist()
    [1.0, 1.0, 0.5]
    """
    speeds = np.asarray(planned_s, np.float64) / np.asarray(measured_s, np.float64)
    return speeds / np.median(speeds)
