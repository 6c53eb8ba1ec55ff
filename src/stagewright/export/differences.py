"""What of a plan another stack does not run: in words, and what a step takes with that alone as it is there."""

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
from stagewright.planning.prediction.sharding import SHARDING_KINDS, sharded_program
from stagewright.schedule import Kind, Program, build
from stagewright.schedule.lower import insert_recomputation
from stagewright.units import format_seconds

Report = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """Something that is otherwise there, a sentence, and the plan with this alone changed; None where nothing runs so."""

    what: str
    alone: Callable[[], Plan | None] = lambda: None


def with_fields(plan: Plan, **fields: Any) -> Callable[[], Plan]:
    """A change to `plan` after which its program is the same."""
    return lambda: plan.model_copy(update=fields)


def with_job(plan: Plan, **fields: Any) -> Callable[[], Plan]:
    """A change to the job."""
    return with_fields(plan, job=plan.job.model_copy(update=fields))


def priced(difference: Difference, plan: Plan, report: Report) -> str:
    """The sentence, with what a step of `plan` takes then, where that can be predicted."""
    asked = plan.predictions.step_seconds
    try:
        if (changed := difference.alone()) is None:
            return difference.what
        report("predicting a difference")
        seconds = estimate(changed, plan.cluster.load(), report=report).predictions.step_seconds
    except StagewrightError:  # with nothing else changed it does not run
        return difference.what
    return f"{difference.what}: alone {format_seconds(seconds)} a step ({seconds / asked - 1:+.1%})"


def with_layers(plan: Plan, graph: OperatorGraph, counts: Sequence[int]) -> Plan | None:
    """`plan` with stages of so many layers."""
    if len(counts) != plan.num_stages or 0 in counts[1:-1]:
        return None
    places = [*layer_begins(graph), layer_end(graph)]
    cuts = [places[end] for end in accumulate(counts[:-1])]
    policies = _at_stages(plan.memory_policy, graph, cuts)
    if policies is None:
        return None
    return _changed(plan, graph, _computations(plan), cuts=cut_names(graph, cuts), memory_policy=policies)


def with_schedule(plan: Plan, graph: OperatorGraph, names: Iterable[str]) -> Plan | None:
    """`plan` with the first schedule of these that has its stages on the same ranks."""
    program = stage_program(plan)
    chunks = plan.num_stages // plan.pp
    for name in names:
        try:
            found = build(name, plan.pp, plan.num_microbatches, chunks if chunks > 1 else None)
        except StagewrightError:
            continue
        if found.placement == program.placement:
            return _changed(plan, graph, found, schedule=name)
    return None


def with_policy(plan: Plan, graph: OperatorGraph, recompute: str) -> Plan | None:
    """`plan`, all stages of which recompute `none`, or every layer."""
    policy = {"none": "keep", "full": "layers"}.get(recompute)
    if policy is None:
        return None
    return _changed(plan, graph, _computations(plan), memory_policy=(policy,) * plan.num_stages)


def with_level(plan: Plan, graph: OperatorGraph, level: int) -> Plan | None:
    """`plan`, whose replicas shard as another ZeRO level says."""
    return _changed(plan, graph, _computations(plan), sharding=(level,) * plan.num_stages)


def _computations(plan: Plan) -> Program:
    """Without recomputation, which goes with the policies, and what replicas do, which goes with the levels."""
    program = stage_program(plan)
    return program.with_ranks(
        (action for action in actions if action.kind not in SHARDING_KINDS | {Kind.R})
        for actions in program.ranks
    )


def _changed(plan: Plan, graph: OperatorGraph, order: Program, **fields: Any) -> Plan | None:
    """`plan` with these fields and computations, and the further actions that they ask for; None where a runtime has some
    of its own."""
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
    return changed.model_copy(update={"program": tuple(tuple(map(str, ranks)) for ranks in program.ranks)})


def _at_stages(
    policies: Sequence[str | StagePolicy], graph: OperatorGraph, cuts: Sequence[int]
) -> tuple[str | StagePolicy, ...] | None:
    """What stages do with values, each at the stage that makes it when the stages are cut at `cuts`; None where some stages
    are said to do as a whole what others are not."""
    if isinstance(policies[0], str) and all(policy == policies[0] for policy in policies):
        return tuple(policies)
    named = [StagePolicy() if policy == "keep" else policy for policy in policies]
    if any(isinstance(policy, str) for policy in named):
        return None
    own = [policy for policy in named if isinstance(policy, StagePolicy)]
    position = {graph.nodes[node].name: index for index, node in enumerate(graph.forward_ids)}

    def of(stage: int, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if bisect_right(cuts, position.get(name, 0)) == stage)

    def merged(stage: int) -> StagePolicy:
        reruns = [pair for policy in own for pair in policy.reruns if of(stage, [pair[0]])]
        return StagePolicy(
            recompute=of(stage, (name for policy in own for name in policy.recompute)),
            offload=of(stage, (name for policy in own for name in policy.offload)),
            checkpoints=of(stage, (name for policy in own for name in policy.checkpoints)),
            fetch_ahead=max(policy.fetch_ahead for policy in own),
            reruns=tuple(reruns),
        )

    return tuple(map(merged, range(len(policies))))
