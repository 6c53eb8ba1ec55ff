"""Differences between a plan and the configuration another framework runs, and the predicted step time of each alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stagewright.errors import StagewrightError
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import PARAMETERS
from stagewright.graph.layers import layer_begins, layer_end
from stagewright.graph.split import split_graph
from stagewright.planning.estimate import estimate
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import cut_names, recomputing_stages, stage_cuts, stage_program
from stagewright.planning.prediction.sharding import (
    SHARDING_KINDS,
    sharded_program,
    streamed_program,
    without_sharding,
)
from stagewright.schedule import Kind, Program, build
from stagewright.schedule.lower import insert_recomputation
from stagewright.units import format_seconds

Report = Callable[[str], None]


@dataclass(frozen=True)
class PlanDifference:
    """One difference, as a sentence, and the plan with only this changed; None if no such plan can run."""

    what: str
    alone: Callable[[], Plan | None] = lambda: None


def with_fields(plan: Plan, **fields: Any) -> Callable[[], Plan]:
    """Return a change of fields of `plan` that leaves its program as it is."""
    return lambda: plan.model_copy(update=fields)


def with_job(plan: Plan, **fields: Any) -> Callable[[], Plan]:
    """Return a change of the job."""
    return with_fields(plan, job=plan.job.model_copy(update=fields))


def with_predicted_time(difference: PlanDifference, plan: Plan, report: Report) -> str:
    """Return the sentence, with the step time of `plan` after this change alone if it can be predicted."""
    planned_s = plan.predictions.step_seconds
    try:
        if (changed := difference.alone()) is None:
            return difference.what
        report("predicting a difference")
        seconds = estimate(changed, plan.cluster.load(), report=report).predictions.step_seconds
    except StagewrightError:  # the plan does not run with this change alone
        return difference.what
    return f"{difference.what}: alone {format_seconds(seconds)} a step ({seconds / planned_s - 1:+.1%})"


def with_layers(plan: Plan, graph: OperatorGraph, counts: Sequence[int]) -> Plan | None:
    """Return `plan` with stages of the given numbers of layers; None if that is no pipeline of the same size."""
    if len(counts) != plan.num_stages or 0 in counts[1:-1]:
        return None
    places = [*layer_begins(graph), layer_end(graph)]
    cuts = [places[end] for end in accumulate(counts[:-1])]
    policies = _at_stages(plan.memory_policy, graph, cuts)
    if policies is None:
        return None
    return _changed(plan, graph, _computations(plan), cuts=cut_names(graph, cuts), memory_policy=policies)


def with_schedule(plan: Plan, graph: OperatorGraph, names: Iterable[str]) -> Plan | None:
    """Return `plan` with the first of the named schedules that places stages on the same ranks; None if there is none."""
    program = stage_program(plan)
    chunks = plan.num_stages // plan.pp
    for name in names:
        try:
            candidate = build(name, plan.pp, plan.num_microbatches, chunks if chunks > 1 else None)
        except StagewrightError:
            continue
        if candidate.placement == program.placement:
            return _changed(plan, graph, candidate, schedule=name)
    return None


def with_policy(plan: Plan, graph: OperatorGraph, recompute: str) -> Plan | None:
    """Return `plan` with the same recomputation in all stages: `none`, or every layer (`full`)."""
    policy = {"none": "keep", "full": "layers"}.get(recompute)
    if policy is None:
        return None
    return _changed(plan, graph, _computations(plan), memory_policy=(policy,) * plan.num_stages)


def with_level(plan: Plan, graph: OperatorGraph, level: int) -> Plan | None:
    """Return `plan` with another ZeRO level."""
    return _changed(plan, graph, _computations(plan), sharding=(level,) * plan.num_stages)


def with_weights_on_devices(plan: Plan) -> Plan:
    """Return `plan` without streamed weights."""
    program = without_sharding(stage_program(plan))
    ranks = tuple(tuple(map(str, actions)) for actions in program.ranks)
    return plan.model_copy(update={"streamed": False, "program": ranks})


def _computations(plan: Plan) -> Program:
    """Return the program without recomputation and without the collectives of replicas, which follow from policies and
    levels."""
    program = stage_program(plan)
    return program.with_ranks(
        (action for action in actions if action.kind not in SHARDING_KINDS | {Kind.R})
        for actions in program.ranks
    )


def _changed(plan: Plan, graph: OperatorGraph, order: Program, **fields: Any) -> Plan | None:
    """Return `plan` with these fields and computations, and with the actions they require; None if the runtime adds actions
    that are not modelled here."""
    changed = plan.model_copy(update=fields)
    profile = plan.job.profile
    if profile.keeps_root and PARAMETERS in changed.sharding:
        return None
    kinds = {action.kind for action in stage_program(plan)}
    program = insert_recomputation(order, recomputing_stages(changed))
    if plan.num_holders > 1 and (kinds & SHARDING_KINDS or max(changed.sharding)):
        once = profile.reduces == "last microbatch"
        stages = split_graph(graph, stage_cuts(changed, graph))
        program = sharded_program(program, stages, changed.sharding, reduces_once=once)
    if changed.streamed:
        stages = split_graph(graph, stage_cuts(changed, graph))
        program = streamed_program(program, stages, changed.updated_on_host)
    return changed.model_copy(update={"program": tuple(tuple(map(str, ranks)) for ranks in program.ranks)})


def _at_stages(
    policies: Sequence[str | StagePolicy], graph: OperatorGraph, cuts: Sequence[int]
) -> tuple[str | StagePolicy, ...] | None:
    """Return the policies of stages cut at `cuts`: each value keeps its policy, at the stage that now produces it. None if
    only some stages have a policy for the stage as a whole."""
    if isinstance(policies[0], str) and all(policy == policies[0] for policy in policies):
        return tuple(policies)
    named = [StagePolicy() if policy == "keep" else policy for policy in policies]
    if any(isinstance(policy, str) for policy in named):
        return None
    policies_by_name = [policy for policy in named if isinstance(policy, StagePolicy)]
    position = {graph.nodes[node].name: index for index, node in enumerate(graph.forward_ids)}

    def of(stage: int, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if bisect_right(cuts, position.get(name, 0)) == stage)

    def merged(stage: int) -> StagePolicy:
        reruns = [pair for policy in policies_by_name for pair in policy.reruns if of(stage, [pair[0]])]
        return StagePolicy(
            recompute=of(stage, (name for policy in policies_by_name for name in policy.recompute)),
            offload=of(stage, (name for policy in policies_by_name for name in policy.offload)),
            checkpoints=of(stage, (name for policy in policies_by_name for name in policy.checkpoints)),
            fetch_ahead=max(policy.fetch_ahead for policy in policies_by_name),
            reruns=tuple(reruns),
        )

    return tuple(map(merged, range(len(policies))))
