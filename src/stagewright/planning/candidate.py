"""Candidates: configurations that are partitioned, within memory where possible, and turned into plans."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from stagewright.cluster import Cluster, all_gather_seconds, reduce_scatter_seconds
from stagewright.errors import InputError, PlanError
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.runtime import STAGEWRIGHT, runtime_of
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import GRADIENTS, PARAMETERS
from stagewright.graph.layers import even_layers, layer_begins, layer_cuts, layer_end
from stagewright.graph.policy import Policy
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.assignment.placing import placed
from stagewright.planning.checkpointing.fit import Fitted, TooSlow, fit, with_layers_recomputed
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.partition.layers import dealt_layers
from stagewright.planning.partition.solver import MemoryBudget, partition
from stagewright.planning.partition.stage_terms import cuts_to_try
from stagewright.planning.plan import REDUCE_TYPES, ClusterSection, ModelSection, Plan, StagePolicy
from stagewright.planning.plan_stages import cut_names, graph_section
from stagewright.planning.prediction.predict import predict, rank_memories, step_seconds
from stagewright.planning.prediction.regions import (
    as_model_says,
    kept_policy,
    layers_policy,
    named_policy,
    selective_policy,
    with_recomputation,
)
from stagewright.planning.prediction.sharding import sharded_program, streamed_program
from stagewright.planning.prediction.staged_model import (
    StagedModel,
    costs_by_rank,
    costs_by_stage,
    reserved_bytes,
    staged_model,
)
from stagewright.planning.prediction.units import around_layers, units_to_try
from stagewright.schedule import Kind, Program, subdivided
from stagewright.schedule.builders import built
from stagewright.schedule.in_flight import in_flight
from stagewright.schedule.lower import insert_recomputation
from stagewright.simulation import StageCosts, simulate
from stagewright.tracing.models.reference import ModelReference
from stagewright.version import __version__

SLACKS = (0.0, 0.02, 0.1)
"""Slowdowns of the slowest stage that are accepted in exchange for smaller boundaries; all are tried."""

SHRINKS = (0.0, 0.04, 0.12)
"""Fractions of the memory left free when cutting by range sums, which are less exact than a replay."""

_HIDDEN = 0.8
"""Fraction of the compute time below which communication is taken to be hidden by it."""

OF_STATE = 0.8
"""Maximum fraction of memory for everything but saved values, where these are to be recomputed or offloaded."""

ALL_TOGETHER = ("breadth-first", "gpipe")
"""Schedules that run all microbatches through a stage before the rank turns to its next stage."""

_MOST_FITTED = 2
"""Number of partitions, the most promising first, that are made to fit before more memory is left free."""

_MEMORY_ROUNDS = 4
"""Maximum number of partitions tried within memory; each estimates what a stage needs besides saved values better."""


@dataclass(frozen=True)
class Candidate:
    """A partitioned configuration and the memory of its ranks; the fullest is over by `excess_bytes` (negative: headroom).

    `cuts` separate the stages of its schedule; each of their sharding units is a stage of `staged`.
    """

    configuration: Configuration
    staged: StagedModel
    cuts: tuple[int, ...]
    memories: tuple[RankMemory, ...]
    excess_bytes: int
    memory_policy: tuple[Literal["keep", "layers", "recompute", "selective"] | StagePolicy, ...]

    def with_headroom(self, num_bytes: int) -> Candidate:
        """Return this candidate with `num_bytes` left free on every device; a negative number adds memory."""
        staged = replace(self.staged, headroom=num_bytes)
        configuration = replace(self.configuration, headroom=num_bytes)
        return replace(
            self, configuration=configuration, staged=staged, excess_bytes=staged.missing_bytes(self.memories)
        )


def make_program(configuration: Configuration) -> Program:
    """Return the program of a configuration: the computations of every rank, in order."""
    program = configuration.program or built(
        configuration.schedule, configuration.pp, configuration.num_microbatches, configuration.chunks
    )
    if configuration.recompute != "full":
        return program
    return insert_recomputation(program, range(program.num_stages))


def policies(configuration: Configuration, program: Program, graph: OperatorGraph) -> list[Policy]:
    """Return the memory policy of every stage of `program`: recompute as `configuration` asks, or keep everything."""
    if configuration.recompute == "selective":
        return [selective_policy(graph)] * program.num_stages
    recomputed, keep = _recomputed_stages(program), kept_policy(graph)
    recompute = layers_policy(graph) if recomputed else keep
    return [recompute if stage in recomputed else keep for stage in range(program.num_stages)]


def _recomputed_stages(program: Program) -> set[int]:
    return {action.stage for action in program if action.kind is Kind.R}


def saved_counts(program: Program, model_costs: RangeCosts) -> list[float]:
    """Return the maximum number of microbatches whose saved values each stage holds at once.

    For a stage that recomputes, the number is scaled by the fraction of the saved values that its layers' inputs are.
    """
    recomputed = _recomputed_stages(program)
    share = _share_of_layer_inputs(model_costs) if recomputed else 1.0
    return [count * share if stage in recomputed else count for stage, count in enumerate(in_flight(program))]


@lru_cache(maxsize=4)
def _share_of_layer_inputs(model_costs: RangeCosts) -> float:
    kept = sum(model_costs.graph.storage_bytes[root] for root in layers_policy(model_costs.graph).checkpoints)
    return min(1.0, kept / max(float(model_costs.saved_bytes[-1]), 1.0))


def approximate_seconds(
    stage_costs: Sequence[RangeCosts], cuts: Sequence[int], program: Program, cluster: Cluster, num_ranks: int
) -> float:
    """Return the makespan of a batch from range sums, without splitting the graph.

    `stage_costs` are the costs of the model on the device of every stage; `num_ranks` devices hold each stage.
    """
    ends = np.array([0, *cuts, stage_costs[0].size])
    spans = [(model_costs, ends[stage], ends[stage + 1]) for stage, model_costs in enumerate(stage_costs)]
    forward = np.array(
        [
            model_costs.forward_seconds[stop] - model_costs.forward_seconds[start]
            for model_costs, start, stop in spans
        ]
    )
    total = np.array(
        [model_costs.seconds[stop] - model_costs.seconds[start] for model_costs, start, stop in spans]
    )
    total = np.maximum(total, forward)  # rounding may make differences of sums smaller
    placed = program.placement.rank_of_stage

    def transfer(source: int, target: int) -> float:
        num_bytes = float(stage_costs[0].boundary_bytes[ends[max(source, target)]]) / 2
        firsts = placed[source] * num_ranks, placed[target] * num_ranks
        return cluster.blocks_seconds(num_bytes, *firsts, num_ranks)

    backward = total - forward
    waits = cluster.kind != "cpu" and runtime_of(stage_costs[0].few).name == STAGEWRIGHT
    if waits:  # ranks compute nothing while they receive
        for stage in range(1, len(placed)):
            if placed[stage - 1] != placed[stage]:
                seconds = transfer(stage - 1, stage)
                forward[stage] += seconds
                backward[stage - 1] += seconds
        return simulate(program, StageCosts.of(forward, backward, 0.0 * total)).makespan_s
    return simulate(program, StageCosts.of(forward, backward, 0.0 * total), transfer).makespan_s


def best_partition(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, budget: MemoryBudget | None
) -> tuple[tuple[int, ...], float] | None:
    """Return the fastest of the partitions with the slacks of `SLACKS` and its makespan from range sums, or None if none
    stays within `budget`.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    program = make_program(configuration)
    width = configuration.ranks_per_stage
    stage_costs = costs_by_stage(model_costs, cluster, program, width)
    tried: dict[tuple[int, ...], float] = {}
    for slack in SLACKS if program.num_stages > 1 else SLACKS[:1]:
        cuts = (
            partition(stage_costs, slack, budget)
            if budget
            else _unlimited_partition(tuple(stage_costs), slack)
        )
        if cuts is not None and tuple(cuts) not in tried:
            tried[tuple(cuts)] = approximate_seconds(stage_costs, cuts, program, cluster, width)
    return min(tried.items(), key=lambda item: item[1]) if tried else None


@lru_cache(maxsize=64)
def _unlimited_partition(stage_costs: tuple[RangeCosts, ...], slack: float) -> list[int] | None:
    """Return the partition without a memory budget; cached, since schedules with equally many stages share it."""
    return partition(stage_costs, slack)


def fastest_partition(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster
) -> tuple[tuple[int, ...], float]:
    """Return the fastest partition regardless of memory, and its makespan from range sums; raises as `best_partition`."""
    best = best_partition(model_costs, configuration, cluster, None)
    assert best is not None, "without a budget there is a partition"
    return best


def make_candidate(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
) -> Candidate:
    """Return the candidate with the partition that `configuration` or the runtime prescribes.

    Where neither prescribes one, it has the fastest partition if that fits the memory limit, otherwise `within_memory`'s.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    if configuration.streamed and configuration.layers_per_stage is None:
        cuts = streamed_cuts(model_costs, configuration, cluster)
        return with_cuts(model_costs, configuration, cuts, cluster, job)
    if is_cut_between_layers(configuration, job):
        return with_cuts(
            model_costs,
            configuration,
            _cuts_between_layers(model_costs.graph, configuration, make_program(configuration)),
            cluster,
            job,
        )
    start = fastest_partition(model_costs, configuration, cluster)[0]
    return within_memory(with_cuts(model_costs, configuration, start, cluster, job), model_costs)


def faster_candidate(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job, below_s: float
) -> Candidate | None:
    """Return the candidate of `make_candidate`, or None where a step is known to take `below_s` or longer."""
    if not is_cut_between_layers(configuration, job):
        return make_candidate(model_costs, configuration, cluster, job)
    cuts = _cuts_between_layers(model_costs.graph, configuration, make_program(configuration))
    if takes_longer(model_costs, configuration, cuts, cluster, job, below_s):
        return None
    return with_cuts(model_costs, configuration, cuts, cluster, job)


def takes_longer(
    model_costs: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    cluster: Cluster,
    job: Job,
    below_s: float,
) -> bool:
    """Return whether a step of this partition, on the best device order, is known to take `below_s` or longer.

    This is cheaper to compute than the memory of the ranks. It is not computed where stages are sharding units.
    """
    if configuration.level >= GRADIENTS or below_s == math.inf:
        return False
    staged = with_program(model_costs, configuration, cuts, make_program(configuration), cluster, job)
    if step_seconds(staged) < below_s:
        return False
    staged_in_order = placed(staged)[0]
    return staged_in_order is staged or step_seconds(staged_in_order) >= below_s


def seconds_in_order(staged: StagedModel) -> float:
    """Return the seconds of a step on the best device order."""
    return step_seconds(placed(staged)[0])


def is_cut_between_layers(configuration: Configuration, job: Job) -> bool:
    return configuration.layers_per_stage is not None or job.profile.partition == "layers"


def _cuts_between_layers(
    graph: OperatorGraph, configuration: Configuration, program: Program
) -> tuple[int, ...]:
    """Return the cuts for the layers per stage of `configuration`, or for numbers as even as possible."""
    layers_per_stage, num_stages = configuration.layers_per_stage, program.num_stages
    if layers_per_stage is None:
        return layer_cuts(graph, even_layers(graph, num_stages)) if num_stages > 1 else ()
    if len(layers_per_stage) != num_stages:
        raise PlanError(
            f"{len(layers_per_stage)} numbers of layers per stage for {num_stages} stages: give one for each of the stages "
            f"of schedule '{configuration.schedule}' on pp {configuration.pp}"
        )
    return layer_cuts(graph, layers_per_stage)


def streamed_cuts(model_costs: RangeCosts, configuration: Configuration, cluster: Cluster) -> tuple[int, ...]:
    """Return the cuts between layers with which all ranks, which stream their stages one by one, take about equally long.

    Raises:
        PlanError: too few layers.
    """
    num_chunks = make_program(configuration).num_stages // configuration.pp
    begins = layer_begins(model_costs.graph)
    ends = (
        [0, *begins, layer_end(model_costs.graph), model_costs.size] if begins else [0, 0, model_costs.size]
    )
    rank_costs = costs_by_rank(model_costs, cluster, configuration.pp, configuration.ranks_per_stage)
    try:
        counts = dealt_layers([np.diff(costs.seconds[ends]) for costs in rank_costs], num_chunks)
    except InputError as error:
        raise PlanError(str(error)) from None
    return layer_cuts(model_costs.graph, counts)


def within_memory(start: Candidate, model_costs: RangeCosts) -> Candidate:
    """Return `start` if it fits the memory limit, otherwise a partition that fits, or else the one over by least."""
    configuration, cluster, job = start.configuration, start.staged.cluster, start.staged.job
    if configuration.streamed:  # stages with other cuts pass through the same memory
        return start
    best = latest = start
    if start.excess_bytes > 0 and configuration.level >= GRADIENTS:
        # Other sharding units may fit where those of `start` do not.
        best = latest = with_cuts(model_costs, configuration, start.cuts, cluster, job)
    for _ in range(_MEMORY_ROUNDS):
        if best.excess_bytes <= 0:
            break
        fastest = best_partition(model_costs, configuration, cluster, _budget(model_costs, latest))
        if fastest is None or fastest[0] == latest.cuts:
            break
        latest = with_cuts(model_costs, configuration, fastest[0], cluster, job)
        if latest.excess_bytes < best.excess_bytes:
            best = latest
    return best


def with_cuts(
    model_costs: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    cluster: Cluster,
    job: Job,
) -> Candidate:
    """Return the candidate of `configuration` with the given cuts."""
    program = make_program(configuration)
    if configuration.level >= GRADIENTS:
        return _best_in_units(model_costs, configuration, cuts, program, cluster, job)
    return candidate_of(
        configuration, cuts, _split_model(model_costs, configuration, cuts, program, cluster, job)
    )


def with_program(
    model_costs: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> StagedModel:
    """Return the model cut at `cuts` under `program`, sharded as `configuration` asks."""
    if configuration.level >= GRADIENTS:
        return _best_in_units(model_costs, configuration, cuts, program, cluster, job).staged
    return _split_model(model_costs, configuration, cuts, program, cluster, job)


def _split_model(
    model_costs: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> StagedModel:
    if configuration.recompute == "model":
        return _as_chosen(
            as_model_says(model_costs, cuts, program, cluster, job, configuration.num_holders), configuration
        )
    chosen = policies(configuration, program, model_costs.graph)
    staged = staged_model(model_costs, cuts, program, cluster, job, configuration.num_holders, chosen)
    if configuration.recompute != "full" and any(policy.recomputes for policy in chosen):
        staged = with_recomputation(staged, program)
    return _as_chosen(staged, configuration)


def _best_in_units(
    model_costs: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> Candidate:
    """Return the partition in the sharding units that `configuration` names, or in the fastest that fit.

    Where none fit, it is the smallest units, which need the least memory; but where these wait for the network, the largest
    that have memory for their state.
    """

    def in_units(inside: Sequence[Sequence[int]]) -> StagedModel:
        every = sorted([*cuts, *(cut for unit_cuts in inside for cut in unit_cuts)])
        divided = subdivided(program, [len(unit_cuts) + 1 for unit_cuts in inside])
        return _split_model(model_costs, configuration, every, divided, cluster, job)

    smallest, *larger = units_to_try(model_costs, cuts, configuration.shard_units)
    smallest_staged = in_units(smallest)
    least = candidate_of(configuration, cuts, smallest_staged)
    if not larger:
        return least
    if least.excess_bytes > 0:
        if not _waits_for_network(model_costs, configuration, cluster, job):
            return least
        candidates = (candidate_of(configuration, cuts, in_units(inside)) for inside in reversed(larger))
        return next(filter(_has_memory_for_state, candidates), least)
    for staged in sorted([smallest_staged, *map(in_units, larger)], key=step_seconds):
        candidate = least if staged is smallest_staged else candidate_of(configuration, cuts, staged)
        if candidate.excess_bytes <= 0:
            return candidate
    return least


def network_seconds(
    configuration: Configuration, parameters: float, cluster: Cluster, job: Job, *, in_units: bool = False
) -> float:
    """Return the seconds in which a rank gathers its `parameters` and reduces their gradients in one batch.

    They are gathered and reduced once per visit of a stage: per microbatch where microbatches pass one by one, or where
    stages are divided `in_units`; per `pp` microbatches where a rank alternates between several stages; and once where all
    microbatches pass together.

    Source: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism (arXiv 2211.05953), traffic of sharded data parallelism.
    Ignores: overlap with computations.
    """
    if configuration.level < GRADIENTS or configuration.num_holders == 1:
        return 0.0
    holders = range(0, configuration.ranks_per_stage, configuration.tp)[: configuration.shard_group]
    visits = float(configuration.num_microbatches)
    if configuration.schedule in ALL_TOGETHER and not in_units:
        visits = 1.0
    elif configuration.chunks is not None and not in_units:
        visits = max(1.0, visits / configuration.pp)
    dtype = REDUCE_TYPES[configuration.reduce_dtype] if configuration.reduce_dtype else job.precision.gradient
    reductions = 1.0 if job.profile.reduces == "last microbatch" else visits
    seconds = reductions * reduce_scatter_seconds(cluster, parameters * ITEM_BYTES[dtype], holders)
    if configuration.level >= PARAMETERS:
        seconds += visits * 2 * all_gather_seconds(cluster, parameters * ITEM_BYTES[job.torch_name], holders)
    return seconds


def _waits_for_network(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
) -> bool:
    """Return whether small units would make communication too long to be hidden by the computations."""
    parameters = float(model_costs.parameter_bytes[-1]) / ITEM_BYTES[job.torch_name] / configuration.pp
    busy_s = float(model_costs.seconds[-1]) * configuration.num_microbatches / configuration.pp
    return network_seconds(configuration, parameters, cluster, job, in_units=True) > _HIDDEN * busy_s


def _has_memory_for_state(candidate: Candidate) -> bool:
    """Return whether all ranks would fit if they saved almost nothing."""
    staged = candidate.staged
    return all(
        memory.peak_bytes - memory.categories.get("activations", 0)
        <= OF_STATE * staged.allocatable_bytes(memory.rank)
        for memory in candidate.memories
    )


def under_program(
    staged: StagedModel, configuration: Configuration, cuts: Sequence[int], program: Program
) -> StagedModel:
    """Return the partition of `staged`, a result of `with_program` for `cuts`, under another program with the same memory
    policies."""
    ends = [*cuts, staged.stages[-1].stop]
    numbers = Counter(bisect_left(ends, stage.stop) for stage in staged.stages)
    divided = subdivided(program, [numbers[stage] for stage in range(program.num_stages)])
    changed = (
        with_recomputation(staged, divided)
        if configuration.recompute == "model"
        else replace(staged, program=divided)
    )
    return _as_chosen(changed, configuration)


def candidate_of(configuration: Configuration, cuts: Sequence[int], staged: StagedModel) -> Candidate:
    """Return the candidate of `staged` with the memory of its ranks.

    The stages of `staged` are those between `cuts` or their sharding units; they keep or recompute everything, or recompute
    what the model's own code checkpoints.
    """
    memories = rank_memories(staged)
    excess = staged.missing_bytes(memories)
    return Candidate(configuration, staged, tuple(cuts), memories, excess, _named(configuration, staged))


def _as_chosen(staged: StagedModel, configuration: Configuration) -> StagedModel:
    """Return `staged` with the headroom, host optimizer, streaming and sharding of `configuration`."""
    staged = replace(staged, headroom=configuration.headroom)
    if configuration.host_optimizer:
        staged = replace(staged, host_optimizer=frozenset(range(staged.pp)))
    if configuration.streamed:
        program = streamed_program(staged.program, staged.stages, staged.updated_on_host)
        return replace(staged, program=program, is_streamed=True)
    if configuration.num_holders == 1:
        return staged
    dtype = None if configuration.reduce_dtype is None else REDUCE_TYPES[configuration.reduce_dtype]
    staged = replace(staged, reduce_dtype=dtype)
    if configuration.zero is None:
        return staged
    levels = (configuration.level,) * len(staged.stages)
    held = (
        around_layers(staged) if configuration.level >= PARAMETERS and staged.job.profile.keeps_root else ()
    )
    once = staged.job.profile.reduces == "last microbatch"
    program = sharded_program(staged.program, staged.stages, levels, held, reduces_once=once)
    return replace(staged, program=program, sharding=levels, shard_size=configuration.shard_group)


def _named(
    configuration: Configuration, staged: StagedModel
) -> tuple[Literal["keep", "layers", "selective"] | StagePolicy, ...]:
    """Return the policies of `policies`, or those of the model's own code, as plans name them."""
    if configuration.recompute == "model":
        return tuple(named_policy(stage) for stage in staged.stages)
    if configuration.recompute == "selective":
        return ("selective",) * staged.program.num_stages
    if configuration.recompute != "full":  # what the runtime always recomputes is no policy
        return ("keep",) * staged.program.num_stages
    recomputed = _recomputed_stages(staged.program)
    return tuple("layers" if stage in recomputed else "keep" for stage in range(staged.program.num_stages))


def fitted_candidate(
    plain: Candidate,
    model_costs: RangeCosts,
    *,
    offload: bool = True,
    thorough: bool = False,
    below_s: float = math.inf,
) -> Candidate | TooSlow | None:
    """Return `plain`, which keeps everything and does not fit, with some values recomputed or offloaded, or None if that is
    not enough; `TooSlow` if it is enough only in batches of `below_s` or longer. If `thorough`, operators may be recomputed
    several times."""
    fitted = fit(plain.staged, model_costs, offload=offload, thorough=thorough, below_s=below_s)
    return _with_choice(plain, fitted) if isinstance(fitted, Fitted) else fitted


def _with_choice(plain: Candidate, fitted: Fitted) -> Candidate:
    """Return `plain`, which keeps everything, with what `fitted` recomputes and offloads."""
    return replace(
        plain,
        staged=fitted.staged,
        memories=fitted.memories,
        excess_bytes=fitted.staged.missing_bytes(fitted.memories),
        memory_policy=fitted.memory_policy,
    )


def fastest_fitted(
    kept: Sequence[Candidate],
    model_costs: RangeCosts,
    *,
    offload: bool = True,
    below_s: float = math.inf,
    longest_s: float = math.inf,
    thorough: bool = False,
    shrinks: Sequence[float] = SHRINKS,
) -> Candidate | TooSlow | None:
    """Return the fastest partition including what it must recompute and offload, or None.

    The partitions of `kept`, which recompute and offload nothing, are tried too. None if no partition fits, or none is
    predicted to take less than `below_s` per batch; `TooSlow` if only batches of `longest_s` or longer may fit. `shrinks`
    are the shares of memory that partitions leave free, one after the other until one fits.
    """
    first, configuration = kept[0], kept[0].configuration
    by_cuts = {candidate.cuts: candidate for candidate in kept}
    if configuration.streamed:
        on_device = with_layers_recomputed(first.staged, model_costs, offload=False)
        if on_device.staged.missing_bytes(on_device.memories) <= 0:
            return fitted_candidate(first, model_costs, offload=False, thorough=thorough)
        if not offload:
            return None
        return _with_choice(first, with_layers_recomputed(first.staged, model_costs, offload=True))
    whole = _whole_stages(first, model_costs) if first.cuts else None
    precision = first.staged.job.precision
    kept_state = configuration.kept_state(model_costs, precision)
    for shrink in shrinks if first.cuts else shrinks[:1]:
        tried = [()] if whole is None else cuts_to_try(
            whole, first.memories, model_costs, () if shrink else by_cuts,
            state_bytes=kept_state, offload=offload, shrink=shrink, below_s=below_s,
        )  # fmt: skip
        for cuts in tried[:_MOST_FITTED]:
            plain = by_cuts.get(cuts) or with_cuts(
                model_costs, configuration, cuts, first.staged.cluster, first.staged.job
            )
            fitted = fitted_candidate(
                plain, model_costs, offload=offload, thorough=thorough, below_s=longest_s
            )
            if fitted is not None:  # other partitions would be slower
                return fitted
    return None


def _whole_stages(candidate: Candidate, model_costs: RangeCosts) -> StagedModel:
    """Return the stages of a candidate's schedule, not divided into sharding units."""
    if len(candidate.staged.stages) == len(candidate.cuts) + 1:
        return candidate.staged
    configuration, staged = candidate.configuration, candidate.staged
    return with_program(
        model_costs,
        replace(configuration, shard_units=1),
        candidate.cuts,
        make_program(configuration),
        staged.cluster,
        staged.job,
    )


def _budget(model_costs: RangeCosts, tried: Candidate) -> MemoryBudget:
    """Return the bytes that each stage may have for state and saved values, if all else takes as much as in `tried`."""
    staged = tried.staged
    program = make_program(tried.configuration)
    counts = saved_counts(program, model_costs)
    ends = np.array([0, *tried.cuts, model_costs.size])
    kept_state = tried.configuration.kept_state(model_costs, staged.job.precision)
    stage_bytes = np.diff(kept_state[ends]) + np.array(counts) * np.diff(model_costs.saved_bytes[ends])
    allowed = [0.0] * program.num_stages
    for memory in tried.memories:
        stages = program.placement.stages_of(memory.rank)
        spare = staged.usable_bytes(memory.rank) - reserved_bytes(memory, staged.device_of(memory.rank))
        for stage in stages:
            allowed[stage] = float(stage_bytes[stage]) + spare / len(stages)
    return MemoryBudget(allowed, counts, kept_state)


def make_plan(candidate: Candidate, model_costs: RangeCosts, reference: ModelReference) -> Plan:
    """Return the plan of a candidate, with its predictions."""
    configuration, cluster = candidate.configuration, candidate.staged.cluster
    staged, devices = placed(candidate.staged)
    program = staged.program
    cuts = cut_names(model_costs.graph, [stage.start for stage in staged.stages[1:]])
    is_run = staged.job.runtime == STAGEWRIGHT
    return Plan(
        stagewright=__version__,
        model=ModelSection.of(reference, model_costs.graph),
        job=staged.job,
        cluster=ClusterSection.of(cluster),
        dp=configuration.dp,
        tp=configuration.tp,
        cp=configuration.cp,
        ep=configuration.ep,
        sequence_parallel=configuration.sequence_parallel,
        loss_pieces=configuration.loss_pieces,
        pp=configuration.pp,
        num_stages=program.num_stages,
        microbatch_size=configuration.microbatch,
        num_microbatches=configuration.num_microbatches,
        cuts=cuts,
        placement=program.placement.rank_of_stage,
        devices=devices,
        schedule=configuration.schedule,
        program=tuple(tuple(str(action) for action in actions) for actions in program.ranks),
        memory_policy=candidate.memory_policy,
        # Other runtimes do not run the operators that were traced.
        graph=graph_section(model_costs.graph, cuts, candidate.memory_policy) if is_run else None,
        sharding=(configuration.level,) * program.num_stages,  # type: ignore[arg-type]
        reduce_dtype=configuration.reduce_dtype if configuration.num_holders > 1 else None,
        shard_size=configuration.shard_group,
        host_optimizer=tuple(sorted(staged.host_optimizer)),
        streamed=configuration.streamed,
        predictions=predict(staged, model_costs, candidate.memories),
    )
