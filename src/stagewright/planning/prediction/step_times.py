"""Timelines and step seconds from the costs that a plan states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stagewright.planning.predictions import StepCosts
from stagewright.schedule import Kind, Program
from stagewright.schedule.action import RECEIVED_BY
from stagewright.simulation import StageCosts, Timeline
from stagewright.simulation import simulate as simulate_program


def simulated(program: Program, costs: StepCosts) -> Timeline:
    """Return the timeline of one batch."""
    stated, costs = costs, with_receiving(costs)
    edges = [(transfer.source, transfer.target) for transfer in costs.transfers]
    transfer_s = {(transfer.source, transfer.target): transfer.value_seconds for transfer in costs.transfers}
    transfer_s |= {
        (transfer.target, transfer.source): transfer.gradient_seconds for transfer in costs.transfers
    }
    stages = StageCosts.of(
        costs.forward_seconds,
        costs.input_grad_seconds,
        costs.weight_grad_seconds,
        backward_s=costs.backward_seconds,
        recompute_s=costs.recompute_seconds or 0.0,
        gather_s=costs.gather_seconds or 0.0,
        reduce_s=costs.reduce_seconds or 0.0,
        step_s=costs.update_seconds or 0.0,
    )
    timeline = simulate_program(program, stages, transfer_s, edges=edges)
    return _with_gaps(timeline, stated) if stated.receivers_wait else timeline


def with_receiving(costs: StepCosts) -> StepCosts:
    """Return costs with the same times and no overlapped transfer: where receivers wait, the seconds of a transfer are added
    to the forward or backward that receives it.

    Ignores: that values from several ranks arrive at the same time; receives that are posted earlier because another value
    of the same rank is used first.
    """
    if not costs.receivers_wait:
        return costs
    forward, backward = receiving_seconds(costs)
    instant = {"value_seconds": 0.0, "gradient_seconds": 0.0}
    update = {
        "forward_seconds": np.add(costs.forward_seconds, forward),
        "input_grad_seconds": np.add(costs.input_grad_seconds, backward),
        "backward_seconds": np.add(costs.backward_seconds, backward),
    }
    return costs.model_copy(
        update={name: tuple(column.tolist()) for name, column in update.items()}
        | {
            "transfers": tuple(transfer.model_copy(update=instant) for transfer in costs.transfers),
            "receivers_wait": False,
        }
    )


def receiving_seconds(costs: StepCosts) -> tuple[list[float], list[float]]:
    """Return the seconds that a forward and a backward of each stage wait for transfers once they could begin."""
    forward, backward = ([0.0] * len(costs.forward_seconds) for _ in range(2))
    for transfer in costs.transfers if costs.receivers_wait else ():
        forward[transfer.target] += transfer.value_seconds
        backward[transfer.source] += transfer.gradient_seconds
    return forward, backward


def _with_gaps(timeline: Timeline, costs: StepCosts) -> Timeline:
    """Return `timeline` with computations that start after their waits for transfers, which become idle time."""
    waits = receiving_seconds(costs)
    of_pattern = [
        sum(waits[part.kind is not Kind.F][part.stage] for part in action.parts if part.kind in RECEIVED_BY)
        for action in timeline.encoded.patterns
    ]
    return replace(timeline, start_s=timeline.start_s + np.array(of_pattern)[timeline.encoded.pattern])


def whole_step_seconds(timeline: Timeline, costs: StepCosts) -> float:
    """Return the seconds of a whole optimizer step whose batch has this `timeline`.

    Ignores: overlap of gradient reductions with the computations of other ranks beyond each rank's own end.
    """
    if not costs.optimizer_seconds:
        return timeline.makespan_s
    slices = [timeline.encoded.rank_slice(rank) for rank in range(len(costs.sum_seconds))]
    begins = [0.0] * len(slices)
    if costs.checks_after:  # a step then takes as long as the longest span of a rank
        begins = [float(timeline.start_s[actions].min(initial=np.inf)) for actions in slices]
    ends = [
        float(timeline.end_s[slices[rank]].max(initial=0.0)) - begins[rank] + summing
        for rank, summing in enumerate(costs.sum_seconds)
    ]
    return max(ends) + costs.norm_seconds + max(costs.optimizer_seconds)


def simulated_seconds(program: Program, costs: StepCosts) -> float:
    """Return the seconds of a whole optimizer step of `program`."""
    return whole_step_seconds(simulated(program, costs), costs)
