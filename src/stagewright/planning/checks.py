"""Checks of a plan's predictions against its own costs: no model is needed, and no foreign code runs."""

from __future__ import annotations

from stagewright.cluster import Cluster
from stagewright.errors import PlanError
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated, whole_step_seconds
from stagewright.planning.predictions import StepCosts
from stagewright.schedule import Program, insert_communication, verify
from stagewright.schedule.lanes import check_lanes
from stagewright.schedule.lower import receives_ahead
from stagewright.schedule.tokens import Edge
from stagewright.units import format_bytes, format_seconds

TOLERANCE = 0.03
"""Relative difference by which a check may differ from the prediction of the plan."""


def check_predicted_time(plan: Plan, costs: StepCosts) -> str:
    """Return a text with the seconds of the program at the plan's costs; raises `PlanError` where the plan predicts another
    time."""
    simulated_s, predicted_s = (
        whole_step_seconds(simulated(stage_program(plan), costs), costs),
        plan.predictions.step_seconds,
    )
    if abs(simulated_s - predicted_s) > TOLERANCE * simulated_s:
        raise PlanError(
            f"the plan says {format_seconds(predicted_s)} per step, but its program takes {format_seconds(simulated_s)} at "
            "its costs: plan again"
        )
    return f"{format_seconds(simulated_s)} per step at the costs that the plan states"


def check_transfers(program: Program, edges: tuple[Edge, ...], on_lanes: bool) -> str:
    """Return a text with the number of transfers that `program` needs; raises `ScheduleError` if they would not match, or
    hang. With `on_lanes` hosts may wait for their GPUs at any time."""
    lowered = verify(insert_communication(program, edges, ahead=receives_ahead(on_lanes)), edges)
    count = lowered.num_actions - program.num_actions
    matched = f"{count} sends and receives, matched and in one order; no deadlock even if every send blocks"
    if not on_lanes:
        return matched
    check_lanes(lowered, edges, waits_for_device=True)
    return f"{matched}, nor if a host waits for its GPU"


def check_predicted_memory(plan: Plan, cluster: Cluster) -> str:
    """Return a text with the memory that the fullest rank reserves; raises `PlanError` where a rank may use less."""
    limits = usable_bytes(plan, cluster)
    for rank in (rank for predictions in plan.by_length.values() for rank in predictions.ranks):
        needed, limit = rank.reserved_peak_bytes, limits[rank.rank]
        if needed > limit:
            raise PlanError(
                f"rank {rank.rank} needs {format_bytes(needed)} at {rank.peak_at or 'its peak'}, "
                f"{format_bytes(needed - limit)} more than it may use ({format_bytes(limit)}): plan again"
            )
    fullest = max(plan.predictions.ranks, key=lambda rank: rank.reserved_peak_bytes)
    needed, limit = format_bytes(fullest.reserved_peak_bytes), format_bytes(limits[fullest.rank])
    return f"at most {needed} (rank {fullest.rank}) of {limit}, as the plan says"


def usable_bytes(plan: Plan, cluster: Cluster) -> list[int]:
    """Return the bytes that the allocator of every pipeline rank may reserve; the minimum over replicas on several kinds of
    devices."""
    width = plan.num_holders * plan.tp
    numbers = plan.devices or range(plan.num_ranks)
    devices_of_rank = [numbers[rank * width : (rank + 1) * width] for rank in range(plan.pp)]
    kinds = [{cluster.device_of(number) for number in devices} for devices in devices_of_rank]
    communicators = {rank.rank: rank.communicator_bytes for rank in plan.predictions.ranks}
    return [
        min(plan.job.usable_bytes(device, cluster, communicators.get(rank, 0)) for device in kinds_of_rank)
        for rank, kinds_of_rank in enumerate(kinds)
    ]
