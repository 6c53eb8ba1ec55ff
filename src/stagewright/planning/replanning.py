"""Another plan for a run that goes on, on devices that are no longer as fast as the plan took them to be, or on fewer.

On as many devices, widths stay; the order of passes, the deferral of weight gradients and the cuts may change, of several
stages a rank may become one, and where stages recompute or offload, that is chosen anew. What that is worth is judged as any
plan is: by predictions on the cluster as it is now. Reconstruction of the dynamic side of AdaPtis, whose text is not known
to us: cheap changes are tried beside dear ones, and the caller weighs gain against cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from stagewright.cluster import Cluster, without
from stagewright.errors import InputError, PlanError, ScheduleError
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.partition.line import cuts_to_try
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import cut_names, stage_cuts
from stagewright.planning.planned_line import planned_line
from stagewright.planning.prediction.pipeline import Pipeline, body_costs
from stagewright.planning.prediction.predict import predict, rank_memories
from stagewright.planning.prediction.step_times import with_receiving
from stagewright.schedule.automatic import SearchSettings, StageTimes, automatic
from stagewright.schedule.in_flight import in_flight
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program


@dataclass(frozen=True)
class Replanned:
    """The best plan found for devices as they are now, what a step of it takes, and what one of the plan that runs does."""

    plan: Plan
    seconds: float
    stays_s: float


def replanned(plan: Plan, cluster: Cluster, graph: OperatorGraph | None = None) -> Replanned:
    """The best that a run of `plan` could go on under on `cluster`, its devices as fast as they are now; that may be `plan`.

    Args:
        graph: of the plan's model, where it is there.

    Raises:
        InputError: the model cannot be resolved.
        PlanError: it has changed.
    """
    body = body_costs(graph_of(plan) if graph is None else graph, cluster, plan.job)
    stays = plan.model_copy(update={"predictions": predict(planned_line(plan, body, cluster), body)})
    best = now = stays
    for start in (plan, *_plainer(plan, cluster), *_saving_anew(plan, cluster)):
        for found in _moved(start, body, cluster):
            if found.predictions.step_seconds < now.predictions.step_seconds:
                best = now = found
    chosen = plan if best is stays else best
    return Replanned(chosen, now.predictions.step_seconds, stays.predictions.step_seconds)


def _moved(plan: Plan, body: RangeCosts, cluster: Cluster) -> Iterator[Plan]:
    """`plan` as it is and with other cuts, each also with another order of passes, as far as they run."""
    line = planned_line(plan, body, cluster)
    for cuts in (tuple(stage_cuts(plan, body.graph)), *_cuts(plan, line, body)):
        moved = _judged(plan.model_copy(update={"cuts": cut_names(body.graph, list(cuts))}), body, cluster)
        if moved is not None:
            yield moved
            if (ordered := _judged(_ordered(moved, line, body), body, cluster)) is not None:
                yield ordered


def _plainer(plan: Plan, cluster: Cluster) -> list[Plan]:
    """Of a plan with several stages a rank, one with one on each: its stages can be as different as the devices, and those
    of the plan were placed for other ones. None where stages recompute or offload, which is chosen for them.
    """
    if plan.num_stages == plan.pp or any(policy != "keep" for policy in plan.memory_policy):
        return []
    try:
        return [
            estimate(
                plan.model.reference(), cluster, plan.job, pp=plan.pp, dp=plan.dp, tp=plan.tp,
                sequence_parallel=plan.sequence_parallel, microbatch=plan.microbatch_size, schedule="1f1b",
                zero=plan.sharding[0] if plan.dp > 1 else None, reduce_dtype=plan.reduce_dtype,
                shard_size=plan.shard_size, loss_pieces=plan.loss_pieces, recompute="none",
            )
        ]  # fmt: skip
    except (InputError, PlanError, ScheduleError):  # such as too few cuts
        return []


def _saving_anew(plan: Plan, cluster: Cluster) -> list[Plan]:
    """Of a plan whose stages recompute or offload, what a short search finds at its widths: what is saved is chosen with the
    cuts, for devices as they are. None where it would have ranks on other devices, which processes cannot change."""
    if all(policy == "keep" for policy in plan.memory_policy):
        return []
    from stagewright.planning.search import plan as searched

    try:
        found = searched(
            plan.model.reference(), cluster, plan.job, keep=1, is_improved=False, pp=plan.pp, dp=plan.dp, tp=plan.tp,
            sequence_parallel=plan.sequence_parallel if plan.tp > 1 else None, microbatch=plan.microbatch_size,
            zero=max(plan.sharding) if plan.dp > 1 else None, reduce_dtype=plan.reduce_dtype, shard_size=plan.shard_size,
            host_optimizer="always" if plan.host_optimizer else "never", loss_pieces=plan.loss_pieces,
        )  # fmt: skip
    except (InputError, PlanError, ScheduleError):
        return []
    return [one for one in found.plans if one.devices == plan.devices]


def replanned_without(plan: Plan, lost: Collection[int]) -> Plan:
    """The best for the model and job of `plan` on its cluster without some devices, as found in seconds: a run waits for it.

    Widths, schedule, cuts and what is recomputed are all chosen anew; gradients are summed in the same type. Ignores: joint
    search, and that state has to be read by other ranks.

    Raises:
        InputError: the model cannot be resolved, or has changed.
        PlanError: nothing fits what is left.
    """
    from stagewright.planning.search import plan as searched

    left = without(plan.cluster.load(), lost)
    reduce = plan.reduce_dtype
    found = searched(plan.model.resolved(), left, plan.job, keep=1, is_improved=False, reduce_dtype=reduce)
    return found.plans[0]


def _ordered(plan: Plan, line: Pipeline, body: RangeCosts) -> Plan:
    """`plan` with the order of passes that suits what they take, on `line`'s devices; as it is where parameters or gradients
    come and go within a batch, or stages recompute, which another order would have to be laid out for anew."""
    costs = plan.predictions.costs
    is_plain = all(level < 2 for level in plan.sharding) and all(
        policy == "keep" for policy in plan.memory_policy
    )
    if costs is None or not is_plain:
        return plan
    costs = with_receiving(costs)
    ends = [0, *stage_cuts(plan, body.graph), len(body.graph.forward_ids)]
    saved = np.diff(np.asarray(body.saved_bytes, float)[ends])
    between = {(one.source, one.target): one.value_seconds for one in costs.transfers}
    hops = [between.get((stage, stage + 1), 0.0) for stage in range(plan.num_stages - 1)]
    times = StageTimes(
        np.array(costs.forward_seconds), np.array(costs.input_grad_seconds), np.array(costs.weight_grad_seconds),
        np.array(hops), saved, saved,
    )  # fmt: skip
    counts, placement = in_flight(line.program), Placement(plan.placement)
    room = []
    for memory in rank_memories(line):
        kept = sum(counts[stage] * saved[stage] for stage in placement.stages_of(memory.rank))
        room.append(line.usable_bytes(memory.rank) - memory.peak_bytes + kept)
    try:
        program = automatic(
            placement,
            plan.num_microbatches,
            times,
            np.array(room),
            SearchSettings(num_moves=_MOVES, num_patterns=_PATTERNS),
        )
    except ScheduleError:
        return plan
    return _with_program(plan, program)


_MOVES, _PATTERNS = 1000, 100
"""Of the search for an order: a run waits for it."""


def _with_program(plan: Plan, program: Program) -> Plan:
    actions = tuple(tuple(map(str, actions)) for actions in program.ranks)
    return plan.model_copy(update={"schedule": program.name, "program": actions})


def _cuts(plan: Plan, line: Pipeline, body: RangeCosts) -> list[tuple[int, ...]]:
    """Cuts that suit the devices of `line`; none where what stages recompute is said operator by operator."""
    if not all(isinstance(policy, str) for policy in plan.memory_policy):
        return []
    shared = plan.num_holders if plan.sharding and min(plan.sharding) >= 1 else 1
    counts = in_flight(line.program)
    found = cuts_to_try(line, rank_memories(line), body, counts, (), state_share=1.0 / shared, offload=False)
    return found[:_MOST_CUTS]


_MOST_CUTS = 3


def _judged(plan: Plan, body: RangeCosts, cluster: Cluster) -> Plan | None:
    """`plan` with its predictions; None where it does not run, or a rank lacks memory."""
    try:
        line = planned_line(plan, body, cluster)
    except (PlanError, ScheduleError):
        return None
    memories = rank_memories(line)
    if line.missing_bytes(memories) > 0:
        return None
    return plan.model_copy(update={"predictions": predict(line, body, memories)})
