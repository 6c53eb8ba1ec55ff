"""When the actions of a batch run, and how long its step takes, by the costs that a plan states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.planning.predictions import StepCosts
from stagewright.schedule import Program
from stagewright.simulation import StageCosts, Timeline, simulate


def simulated(program: Program, costs: StepCosts) -> Timeline:
    """When the actions of one batch run."""
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
    return simulate(program, stages, flights, edges=edges)


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
