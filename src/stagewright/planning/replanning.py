"""Replanning of a run whose devices are slower than the plan assumed, or fewer.

On the same devices, parallel degrees stay; the order of actions, the deferral of weight gradients and the cuts may change,
several stages per rank may become one, and where stages recompute or offload, that is chosen again. The gain is judged like
any plan: by predictions on the cluster as it is now. Reconstruction of the dynamic side of AdaPtis, whose text is not known
to us: cheap and expensive changes are both tried, and the caller weighs gain against cost.
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
from stagewright.planning.partition.stage_terms import cuts_to_try
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import configuration_of, cut_names, stage_cuts, staged_by_plan
from stagewright.planning.prediction.predict import predict, rank_memories
from stagewright.planning.prediction.staged_model import StagedModel, costs_of_model
from stagewright.planning.prediction.step_times import with_receiving
from stagewright.schedule.automatic import SearchSettings, StageTimes, automatic
from stagewright.schedule.in_flight import in_flight
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program


@dataclass(frozen=True)
class Replanned:
    """The best plan for the devices as they are now, and the step seconds of it and of the running plan."""

    plan: Plan
    seconds: float
    stays_s: float


def replanned(plan: Plan, cluster: Cluster, graph: OperatorGraph | None = None) -> Replanned:
    """Return the best plan, possibly `plan` itself, with which a run of `plan` can continue on `cluster` at current speeds.

    Args:
        graph: that of the plan's model, if already traced.

    Raises:
        InputError: the model cannot be resolved.
        PlanError: the model has changed.
    """
    model_costs = costs_of_model(graph_of(plan) if graph is None else graph, cluster, plan.job)
    stays = plan.model_copy(
        update={"predictions": predict(staged_by_plan(plan, model_costs, cluster), model_costs)}
    )
    best = now = stays
    for start in (plan, *_plainer(plan, cluster), *_with_recomputation_chosen_again(plan, cluster)):
        for candidate in _moved(start, model_costs, cluster):
            if candidate.predictions.step_seconds < now.predictions.step_seconds:
                best = now = candidate
    chosen = plan if best is stays else best
    return Replanned(chosen, now.predictions.step_seconds, stays.predictions.step_seconds)


def _moved(plan: Plan, model_costs: RangeCosts, cluster: Cluster) -> Iterator[Plan]:
    """Yield `plan` and variants of it with other cuts, each also with another order of actions, if they run."""
    staged = staged_by_plan(plan, model_costs, cluster)
    for cuts in (tuple(stage_cuts(plan, model_costs.graph)), *_cuts(plan, staged, model_costs)):
        moved = _judged(
            plan.model_copy(update={"cuts": cut_names(model_costs.graph, list(cuts))}), model_costs, cluster
        )
        if moved is not None:
            yield moved
            if (ordered := _judged(_ordered(moved, staged, model_costs), model_costs, cluster)) is not None:
                yield ordered


def _plainer(plan: Plan, cluster: Cluster) -> list[Plan]:
    """Return a plan with one stage per rank for a plan with several: its stages can be as different as the devices, while
    those of the plan were placed for other devices. There is none where stages recompute or offload, as that was chosen for
    them.
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


def _with_recomputation_chosen_again(plan: Plan, cluster: Cluster) -> list[Plan]:
    """Return the plans of a short search with the same degrees for a plan whose stages recompute or offload: that is chosen
    together with the cuts, for the devices as they are now. Plans with ranks on other devices are left out, as processes
    cannot move."""
    if all(policy == "keep" for policy in plan.memory_policy):
        return []
    from stagewright.planning.search import plan as searched

    try:
        result = searched(
            plan.model.reference(), cluster, plan.job, keep=1, is_improved=False, pp=plan.pp, dp=plan.dp, tp=plan.tp,
            sequence_parallel=plan.sequence_parallel if plan.tp > 1 else None, microbatch=plan.microbatch_size,
            zero=max(plan.sharding) if plan.dp > 1 else None, reduce_dtype=plan.reduce_dtype, shard_size=plan.shard_size,
            host_optimizer="always" if plan.host_optimizer else "never", loss_pieces=plan.loss_pieces,
            streamed="always" if plan.streamed else "never",
        )  # fmt: skip
    except (InputError, PlanError, ScheduleError):
        return []
    return [candidate for candidate in result.plans if candidate.devices == plan.devices]


def replanned_without(plan: Plan, lost: Collection[int]) -> Plan:
    """Return the best plan for the model and job of `plan` on its cluster without the `lost` devices, from a search of a few
    seconds, as a run waits for it.

    Degrees, schedule, cuts and recomputation are all chosen again; gradients are reduced in the same type. Ignores: joint
    search, and that state has to be read by other ranks.

    Raises:
        InputError: the model cannot be resolved, or has changed.
        PlanError: nothing fits on the remaining devices.
    """
    from stagewright.planning.search import plan as searched

    remaining = without(plan.cluster.load(), lost)
    reduce = plan.reduce_dtype
    result = searched(
        plan.model.resolved(), remaining, plan.job, keep=1, is_improved=False, reduce_dtype=reduce
    )
    return result.plans[0]


def _ordered(plan: Plan, staged: StagedModel, model_costs: RangeCosts) -> Plan:
    """Return `plan` with the order of actions that suits their times on the devices of `staged`.

    It is unchanged where parameters are gathered or streamed or gradients reduced within a batch, or where stages recompute,
    which would have to be chosen again for another order.
    """
    costs = plan.predictions.costs
    is_plain = all(level < 2 for level in plan.sharding) and all(
        policy == "keep" for policy in plan.memory_policy
    )
    if costs is None or not is_plain or plan.streamed:
        return plan
    costs = with_receiving(costs)
    ends = [0, *stage_cuts(plan, model_costs.graph), len(model_costs.graph.forward_ids)]
    saved = np.diff(np.asarray(model_costs.saved_bytes, float)[ends])
    between = {(transfer.source, transfer.target): transfer.value_seconds for transfer in costs.transfers}
    transfer_s = [between.get((stage, stage + 1), 0.0) for stage in range(plan.num_stages - 1)]
    times = StageTimes(
        np.array(costs.forward_seconds), np.array(costs.input_grad_seconds), np.array(costs.weight_grad_seconds),
        np.array(transfer_s), saved, saved,
    )  # fmt: skip
    counts, placement = in_flight(staged.program), Placement(plan.placement)
    headroom = []
    for memory in rank_memories(staged):
        kept = sum(counts[stage] * saved[stage] for stage in placement.stages_of(memory.rank))
        headroom.append(staged.usable_bytes(memory.rank) - memory.peak_bytes + kept)
    try:
        program = automatic(
            placement,
            plan.num_microbatches,
            times,
            np.array(headroom),
            SearchSettings(num_moves=_MOVES, num_patterns=_PATTERNS),
        )
    except ScheduleError:
        return plan
    return _with_program(plan, program)


_MOVES, _PATTERNS = 1000, 100
"""Effort of the search for an order, which is small because a run waits for it."""


def _with_program(plan: Plan, program: Program) -> Plan:
    actions = tuple(tuple(map(str, actions)) for actions in program.ranks)
    return plan.model_copy(update={"schedule": program.name, "program": actions})


def _cuts(plan: Plan, staged: StagedModel, model_costs: RangeCosts) -> list[tuple[int, ...]]:
    """Return cuts that suit the devices of `staged`; none where recomputation is defined operator by operator."""
    if not all(isinstance(policy, str) for policy in plan.memory_policy):
        return []
    kept_state = configuration_of(plan).kept_state(model_costs, plan.job.precision)
    memories = rank_memories(staged)
    candidates = cuts_to_try(staged, memories, model_costs, (), state_bytes=kept_state, offload=False)
    return candidates[:_MOST_CUTS]


_MOST_CUTS = 3


def _judged(plan: Plan, model_costs: RangeCosts, cluster: Cluster) -> Plan | None:
    """Return `plan` with its predictions, or None where it does not run or does not fit."""
    try:
        staged = staged_by_plan(plan, model_costs, cluster)
    except (PlanError, ScheduleError):
        return None
    memories = rank_memories(staged)
    if staged.missing_bytes(memories) > 0:
        return None
    return plan.model_copy(update={"predictions": predict(staged, model_costs, memories)})
