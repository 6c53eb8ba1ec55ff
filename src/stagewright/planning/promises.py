"""What a plan promises, judged by what it states itself: nothing of its model is needed, and no code of others runs."""

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
"""Part by which what is found now may differ from what a plan says."""


def check_promised_time(plan: Plan, costs: StepCosts) -> str:
    """What the program takes with the plan's costs, in words; raises `PlanError` where the plan says something else."""
    taken, said = (
        whole_step_seconds(simulated(stage_program(plan), costs), costs),
        plan.predictions.step_seconds,
    )
    if abs(taken - said) > TOLERANCE * taken:
        raise PlanError(
            f"the plan says {format_seconds(said)} per step, but its program takes {format_seconds(taken)} at its costs: "
            "plan again"
        )
    return f"{format_seconds(taken)} per step at the costs that the plan states"


def check_transfers(program: Program, edges: tuple[Edge, ...], on_lanes: bool) -> str:
    """How many transfers `program` needs, in words; raises `ScheduleError` if they would not match, or hang. With `on_lanes`
    hosts may wait for their GPUs at any time."""
    lowered = verify(insert_communication(program, edges, ahead=receives_ahead(on_lanes)), edges)
    count = lowered.num_actions - program.num_actions
    matched = f"{count} sends and receives, matched and in one order; no deadlock even if every send blocks"
    if not on_lanes:
        return matched
    check_lanes(lowered, edges, waits_for_device=True)
    return f"{matched}, nor if a host waits for its GPU"


def check_promised_memory(plan: Plan, cluster: Cluster) -> str:
    """How much of its memory the fullest rank reserves, in words; raises `PlanError` where one has less."""
    limits = usable_bytes(plan, cluster)
    for rank in (rank for one in plan.by_length.values() for rank in one.ranks):
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
    """What the allocator of every pipeline rank may reserve; of replicas on several kinds of devices the least."""
    width = plan.num_holders * plan.tp
    numbers = plan.devices or range(plan.num_ranks)
    own = [numbers[rank * width : (rank + 1) * width] for rank in range(plan.pp)]
    kinds = [{cluster.device_of(number) for number in some} for some in own]
    communicators = {rank.rank: rank.communicator_bytes for rank in plan.predictions.ranks}
    return [
        min(plan.job.usable_bytes(device, cluster, communicators.get(rank, 0)) for device in some)
        for rank, some in enumerate(kinds)
    ]
