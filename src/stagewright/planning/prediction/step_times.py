"""When the actions of a batch run, and how long its step takes, by the costs that a plan states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stagewright.planning.predictions import StepCosts
from stagewright.schedule import Kind, Program
from stagewright.schedule.action import RECEIVED_BY
from stagewright.simulation import StageCosts, Timeline, simulate


def simulated(program: Program, costs: StepCosts) -> Timeline:
    """When the actions of one batch run."""
    whole, costs = costs, with_receiving(costs)
    edges = [(one.source, one.target) for one in costs.transfers]
    flights = {(one.source, one.target): one.value_seconds for one in costs.transfers}
    flights |= {(one.target, one.source): one.gradient_seconds for one in costs.transfers}
    stages = StageCosts.of(
        costs.forward_seconds,
        costs.input_grad_seconds,
        costs.weight_grad_seconds,
        backward_s=costs.backward_seconds,
        recompute_s=_or_zero(costs.recompute_seconds),
        gather_s=_or_zero(costs.gather_seconds),
        reduce_s=_or_zero(costs.reduce_seconds),
        step_s=_or_zero(costs.update_seconds),
    )
    timeline = simulate(program, stages, flights, edges=edges)
    return _with_gaps(timeline, whole) if whole.receivers_wait else timeline


def with_receiving(costs: StepCosts) -> StepCosts:
    """`costs` of the same times, in which no transfer is hidden: where receivers wait, their forwards and backwards take as
    much longer.

    Ignores: that values of several ranks arrive at the same time; receives that are posted earlier, as another value of the
    same rank is used first.
    """
    if not costs.receivers_wait:
        return costs
    forward, backward = receiving_seconds(costs)
    still = {"value_seconds": 0.0, "gradient_seconds": 0.0}
    update = {
        "forward_seconds": np.add(costs.forward_seconds, forward),
        "input_grad_seconds": np.add(costs.input_grad_seconds, backward),
        "backward_seconds": np.add(costs.backward_seconds, backward),
    }
    return costs.model_copy(
        update={name: tuple(column.tolist()) for name, column in update.items()}
        | {
            "transfers": tuple(one.model_copy(update=still) for one in costs.transfers),
            "receivers_wait": False,
        }
    )


def receiving_seconds(costs: StepCosts) -> tuple[list[float], list[float]]:
    """For how long a forward and a backward of each stage wait for what is on its way once they could begin."""
    forward, backward = ([0.0] * len(costs.forward_seconds) for _ in range(2))
    for one in costs.transfers if costs.receivers_wait else ():
        forward[one.target] += one.value_seconds
        backward[one.source] += one.gradient_seconds
    return forward, backward


def _with_gaps(timeline: Timeline, costs: StepCosts) -> Timeline:
    """`timeline`, in which computations begin when what they wait for has arrived."""
    waits = receiving_seconds(costs)
    of_pattern = [
        sum(waits[part.kind is not Kind.F][part.stage] for part in action.parts if part.kind in RECEIVED_BY)
        for action in timeline.encoded.patterns
    ]
    return replace(timeline, start_s=timeline.start_s + np.array(of_pattern)[timeline.encoded.pattern])


def whole_step_seconds(timeline: Timeline, costs: StepCosts) -> float:
    """Seconds of a whole optimizer step, of which `timeline` is the batch.

    Ignores: overlap of the sums with the computations of other ranks beyond each rank's own end.
    """
    if not costs.optimizer_seconds:
        return timeline.makespan_s
    slices = [timeline.encoded.rank_slice(rank) for rank in range(len(costs.sum_seconds))]
    begins = [0.0] * len(slices)
    if costs.checks_after:  # then a step takes the longest span of a rank
        begins = [float(timeline.start_s[own].min(initial=np.inf)) for own in slices]
    ends = [
        float(timeline.end_s[slices[rank]].max(initial=0.0)) - begins[rank] + summing
        for rank, summing in enumerate(costs.sum_seconds)
    ]
    return max(ends) + costs.norm_seconds + max(costs.optimizer_seconds)


def _or_zero(column: Sequence[float]) -> Sequence[float] | float:
    return column or 0.0
