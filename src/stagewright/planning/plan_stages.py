"""The stages of a plan: cuts and memory policies in a traced model, program, pipeline, and layers per stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from stagewright.cluster import Cluster
from stagewright.errors import PlanError, ScheduleError, nearest
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.document import graph_digest
from stagewright.graph.flat_buffers import GRADIENTS
from stagewright.graph.layers import layer_begins, layer_end, layer_of
from stagewright.graph.policy import RECOMPUTE_ALL, Policy
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.plan import GraphSection, Plan, StagePolicy
from stagewright.planning.prediction.regions import kept_policy, layers_policy, selective_policy
from stagewright.planning.prediction.staged_model import StagedModel, staged_model
from stagewright.schedule import Action, Kind, Placement, Program, verify
from stagewright.schedule.placement import loop, v
from stagewright.tracing.cache import tracing_packages
from stagewright.tracing.models.overrides import of_text


def cut_names(graph: OperatorGraph, cuts: list[int]) -> tuple[str, ...]:
    """Return the names of the first operators after the cut indices `cuts`, the same in every trace of the model."""
    return tuple(graph.nodes[graph.forward_ids[cut]].name for cut in cuts)


def graph_section(graph: OperatorGraph, cuts: Iterable[str], policies: Iterable[object]) -> GraphSection:
    """Return the graph section of a plan with these cuts and memory policies."""
    names = [name for policy in policies if isinstance(policy, StagePolicy) for name in policy.names]
    kinds = {graph.nodes[node].name: graph.nodes[node].op for node in graph.forward_ids}
    return GraphSection(
        digest=graph_digest(graph),
        operators={name: kinds[name] for name in dict.fromkeys((*cuts, *names))},
        packages=_packages(),
    )


def _packages() -> dict[str, str]:
    """Return the versions of the tracing packages, without the devices they were built for."""
    return {name: version.partition("+")[0] for name, version in tracing_packages().items()}


class _Named:
    """A lookup of operators of `graph` by their names in `plan`."""

    def __init__(self, plan: Plan, graph: OperatorGraph) -> None:
        self._planned = plan.graph
        self._graph = graph
        self._numbers = {graph.nodes[node].name: node for node in graph.forward_ids}

    def node(self, name: str, use: str) -> int:
        """Return the node called `name`; `use` says in messages what the plan uses it for.

        Raises:
            PlanError: it does not exist, or is another operator than in the plan's graph.
        """
        kind = self._planned.operators.get(name) if self._planned is not None else None
        number = self._numbers.get(name)
        planned = f" ({kind})" if kind else ""
        if number is None:
            raise PlanError(
                f"{use} operator '{name}'{planned}, which the traced model '{self._graph.name}' does not "
                f"have{nearest(name, self._numbers)}: {self._remedy()}"
            )
        traced = self._graph.nodes[number].op
        if kind and traced != kind:
            raise PlanError(
                f"{use} operator '{name}', which is {kind} in the plan's graph and {traced} in the model "
                f"'{self._graph.name}' as traced here: {self._remedy()}"
            )
        return number

    def _remedy(self) -> str:
        here = _packages()
        planned = self._planned.packages if self._planned is not None else here
        changed = [name for name in planned if planned[name] != here.get(name)]
        if not changed:
            return "plan again for this model"
        planned_versions, installed = (
            ", ".join(f"{name} {of.get(name)}" for name in changed) for of in (planned, here)
        )
        return f"the plan was made with {planned_versions}, and here is {installed}: install the same, or plan again here"


def layers_per_stage(plan: Plan) -> tuple[int, ...] | None:
    """Return the number of numbered layers in each stage of `plan`, or None where it is cut elsewhere or the model's config
    does not have the number of layers."""
    config = of_text(plan.model.reference().config or {})
    total = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), 0)
    starts, seen = [0], set[str]()
    for cut in plan.cuts:
        path, _, number = layer_of(cut.rpartition(":")[0]).rpartition(".")
        seen.add(path)
        starts.append(int(number) if number else total)
    counts = tuple(after - before for before, after in pairwise([*starts, total]))
    return counts if total and min(counts) >= 0 and len(seen - {""}) <= 1 else None


def stage_cuts(plan: Plan, graph: OperatorGraph) -> list[int]:
    """Return the cut indices of `plan` in `graph`.

    Raises:
        PlanError: a cut names an operator that the graph does not have, or that is a different one in it.
    """
    named = _Named(plan, graph)
    return [graph.position[named.node(name, "the plan cuts before")] for name in plan.cuts]


def stage_policies(plan: Plan, graph: OperatorGraph) -> list[Policy]:
    """Return the memory policy of every stage of `plan`, in values of `graph`.

    Raises:
        PlanError: a policy names an operator that the graph does not have, or that is a different one in it.
    """
    named = _Named(plan, graph)

    def number(name: str) -> int:
        return named.node(name, "a memory policy of the plan names")

    def values(names: tuple[str, ...]) -> frozenset[int]:
        outputs_of_nodes = (graph.nodes[number(name)].outputs for name in names)
        return frozenset(value for outputs in outputs_of_nodes for value in outputs if value is not None)

    def policy(text: str | StagePolicy) -> Policy:
        if isinstance(text, StagePolicy):
            return Policy(
                values(text.recompute),
                values(text.offload),
                checkpoints=values(text.checkpoints),
                fetch_ahead=text.fetch_ahead,
                reruns=tuple((number(target), tuple(map(number, rerun))) for target, rerun in text.reruns),
            )
        if text == "layers":
            return layers_policy(graph)
        if text == "selective":
            return selective_policy(graph)
        return RECOMPUTE_ALL if text == "recompute" else kept_policy(graph)

    return [policy(text) for text in plan.memory_policy]


def recomputing_stages(plan: Plan) -> set[int]:
    """Return the stages that recompute values or fetch them from the host before their backward."""
    return {
        stage
        for stage, policy in enumerate(plan.memory_policy)
        if policy in ("recompute", "layers")
        or (isinstance(policy, StagePolicy) and (policy.recompute or policy.offload))
    }


def stage_program(plan: Plan) -> Program:
    """Return the program of one batch.

    Raises:
        ScheduleError: the program does not fit the placement, is incomplete or would deadlock, or does not recompute or
            gather the stages that the plan says.
    """
    ranks = tuple(tuple(Action.parse(text) for text in actions) for actions in plan.program)
    done = [(part.kind, part.stage) for actions in ranks for action in actions for part in action.parts]
    recomputed = {stage for kind, stage in done if kind is Kind.R}
    expected = recomputing_stages(plan)
    if (
        expected != recomputed and plan.job.runtime == STAGEWRIGHT
    ):  # other runtimes may always recompute something
        raise ScheduleError(
            f"the program has R for stages {sorted(recomputed)}, but the memory policy recomputes or offloads in stages "
            f"{sorted(expected)}: both must name the same stages"
        )
    _check_gathers(plan, ranks)
    return verify(Program(plan.schedule, Placement(plan.placement), plan.num_microbatches, ranks))


def _check_gathers(plan: Plan, ranks: Iterable[Iterable[Action]]) -> None:
    """Raise `ScheduleError` unless the program gathers exactly the stages whose parameters are sharded or streamed."""
    gathered = {action.stage for actions in ranks for action in actions if action.kind is Kind.GATHER}
    sharded = (
        {stage for stage, level in enumerate(plan.sharding) if level == 3} if plan.num_holders > 1 else set()
    )
    if plan.streamed:
        sharded = set(range(plan.num_stages))
    if gathered != sharded:
        raise ScheduleError(
            f"the program gathers stages {sorted(gathered)}, but `sharding` with dp {plan.dp}, or `streamed`, is for stages "
            f"{sorted(sharded)}: both must name the same stages"
        )


def hides_copies(plan: Plan) -> bool:
    """Return whether ranks compute for longer than their streamed weights are copied to them."""
    costs, program = plan.predictions.costs, stage_program(plan)
    if costs is None or not costs.gather_seconds:
        return True
    return all(
        sum(
            costs.gather_seconds[action.stage]
            for action in program.actions(rank.rank)
            if action.kind is Kind.GATHER
        )
        <= rank.busy_seconds
        for rank in plan.predictions.ranks
    )


def configuration_of(plan: Plan) -> Configuration:
    """Return the configuration of `plan`: degrees, schedule, sharding, and the recompute setting if all stages share one."""
    has_sums = any("REDUCE" in text for actions in plan.program for text in actions)
    recomputed: dict[str, Recompute] = {"keep": "none", "layers": "full", "selective": "selective"}
    policies = set(map(str, plan.memory_policy))
    chunks = len(stage_ranks(plan)) // plan.pp
    return Configuration(
        pp=plan.pp,
        dp=plan.dp,
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        sequence_parallel=plan.sequence_parallel,
        microbatch=plan.microbatch_size,
        schedule=plan.schedule,
        chunks=chunks if chunks > 1 and is_looped(plan) else None,
        recompute=recomputed.get(policies.pop()) if len(policies) == 1 else None,
        zero=max(plan.sharding) or (0 if has_sums else None),
        reduce_dtype=plan.reduce_dtype,
        shard_size=plan.shard_size,
        streamed=plan.streamed,
    )


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the ranks of the stages of the schedule of `plan`."""
    ends = [0, *accumulate(_units(plan))]
    return tuple(plan.placement[end] for end in ends[:-1])


def stage_layers(plan: Plan) -> tuple[int, ...] | None:
    """Return the numbered layers of every stage of the schedule; a layer that is cut counts for the stage after the cut.

    None where stages do not consist of numbered layers.
    """
    counts = layers_per_stage(plan)
    ends = list(accumulate(_units(plan)))
    return counts and tuple(sum(counts[start:end]) for start, end in pairwise([0, *ends]))


def _units(plan: Plan) -> list[int]:
    """Return the number of stages of `plan` per stage of its schedule: its sharding units, with ZeRO 2 and 3."""
    if max(plan.sharding) < GRADIENTS or (plan.pp > 1 and plan.placement in _placements(plan)):
        return [1] * plan.num_stages
    return [len(list(units)) for _, units in groupby(plan.placement)]


def _placements(plan: Plan) -> list[tuple[int, ...]]:
    """Return the placements of schedules with equally many stages."""
    chunks = plan.num_stages // plan.pp
    v_shaped = [v(plan.pp)] if chunks == 2 else []
    return [placement.rank_of_stage for placement in (*v_shaped, loop(plan.pp, max(chunks, 1)))]


def is_looped(plan: Plan) -> bool:
    """Return whether stage s of the schedule is on rank s mod pp, with equally many stages on every rank."""
    ranks = stage_ranks(plan)
    return len(ranks) % plan.pp == 0 and ranks == loop(plan.pp, len(ranks) // plan.pp).rank_of_stage


def whole_layers(plan: Plan, graph: OperatorGraph) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of layers per stage of the schedule with cuts moved to the nearest places between layers, and
    whether any cut moves."""
    places = [*layer_begins(graph), layer_end(graph)]
    ends = list(accumulate(_units(plan)))
    cuts = stage_cuts(plan, graph)
    schedule_cuts = [cuts[end - 1] for end in ends[:-1]]
    near = [
        min(range(len(places)), key=lambda index, cut=cut: abs(places[index] - cut)) for cut in schedule_cuts
    ]
    moves = any(places[index] != cut for index, cut in zip(near, schedule_cuts, strict=True))
    return tuple(after - before for before, after in pairwise([0, *near, len(places) - 1])), moves


def staged_by_plan(plan: Plan, model_costs: RangeCosts, cluster: Cluster) -> StagedModel:
    """Return `model_costs` split and run on `cluster` as `plan` says, ready to be simulated and replayed.

    Raises:
        PlanError: the model does not have the plan's cuts.
        ScheduleError: the program does not run.
    """
    policies = stage_policies(plan, model_costs.graph)
    cuts, program = stage_cuts(plan, model_costs.graph), stage_program(plan)
    staged = staged_model(
        model_costs, cuts, program, on_devices(cluster, plan.devices), plan.job, plan.num_holders, policies
    )
    return replace(
        staged,
        sharding=plan.sharding,
        shard_size=plan.shard_size,
        reduce_dtype=plan.reduce_torch_name,
        host_optimizer=frozenset(plan.host_optimizer),
        is_streamed=plan.streamed,
    )
