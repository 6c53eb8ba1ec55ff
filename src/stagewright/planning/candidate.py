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
from stagewright.errors import PlanError
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.runtime import STAGEWRIGHT, runtime_of
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import GRADIENTS, PARAMETERS
from stagewright.graph.layers import even_layers, layer_cuts
from stagewright.graph.policy import Policy
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.assignment.placing import placed
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.partition.line import cuts_to_try
from stagewright.planning.partition.solver import MemoryBudget, partition
from stagewright.planning.plan import REDUCE_TYPES, ClusterSection, ModelSection, Plan, StagePolicy
from stagewright.planning.plan_stages import cut_names, graph_section
from stagewright.planning.prediction.pipeline import Pipeline, pipeline, reserved_bytes, stage_bodies
from stagewright.planning.prediction.predict import predict, rank_memories, step_seconds
from stagewright.planning.prediction.regions import (
    as_model_says,
    kept_policy,
    layers_policy,
    named_policy,
    selective_policy,
    with_recomputation,
)
from stagewright.planning.prediction.sharding import sharded_program
from stagewright.planning.prediction.shortening import built
from stagewright.planning.prediction.units import around_layers, units_to_try
from stagewright.planning.saving.fit import fit
from stagewright.schedule import Kind, Program, subdivided
from stagewright.schedule.in_flight import in_flight
from stagewright.schedule.lower import insert_recomputation
from stagewright.simulation import StageCosts, simulate
from stagewright.tracing.models.reference import ModelReference
from stagewright.version import __version__

SLACKS = (0.0, 0.02, 0.1)
"""Slowdowns of the slowest stage that are accepted in exchange for smaller boundaries; all are tried."""

_SHRINKS = (0.0, 0.04, 0.12)
"""Fractions of the memory left free when cutting by range sums, which are less exact than a replay."""

_HIDDEN = 0.8
"""Fraction of the compute time below which communication is taken to be hidden by it."""

OF_STATE = 0.8
"""Maximum fraction of memory for everything but saved values, where these are to be recomputed or offloaded."""

_ALL_TOGETHER = ("breadth-first", "gpipe")
"""Schedules that run all microbatches through a stage before the rank turns to its next stage."""

_MOST_FITTED = 2
"""Number of partitions, the most promising first, that are made to fit before more memory is left free."""

_MEMORY_ROUNDS = 4
"""Maximum number of partitions tried within memory; each estimates what a stage needs besides saved values better."""


@dataclass(frozen=True)
class Candidate:
    """A partitioned configuration and the memory of its ranks; the fullest is over by `excess_bytes` (negative: headroom).

    `cuts` separate the stages of its schedule; each of their sharding units is a stage of `line`.
    """

    configuration: Configuration
    line: Pipeline
    cuts: tuple[int, ...]
    memories: tuple[RankMemory, ...]
    excess_bytes: int
    memory_policy: tuple[Literal["keep", "layers", "recompute", "selective"] | StagePolicy, ...]

    def with_headroom(self, num_bytes: int) -> Candidate:
        """Return this candidate with `num_bytes` left free on every device; a negative number adds memory."""
        line = replace(self.line, headroom=num_bytes)
        configuration = replace(self.configuration, headroom=num_bytes)
        return replace(
            self, configuration=configuration, line=line, excess_bytes=line.missing_bytes(self.memories)
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
    recomputed = {action.stage for action in program if action.kind is Kind.R}
    if configuration.recompute == "selective":
        return [selective_policy(graph)] * program.num_stages
    kept = kept_policy(graph)
    again = layers_policy(graph) if recomputed else kept
    return [again if stage in recomputed else kept for stage in range(program.num_stages)]


def saved_counts(program: Program, body: RangeCosts) -> list[float]:
    """Return the maximum number of microbatches whose saved values each stage holds at once.

    For a stage that recomputes, the number is scaled by the fraction of the saved values that its layers' inputs are.
    """
    recomputed = {action.stage for action in program if action.kind is Kind.R}
    share = _share_of_layer_inputs(body) if recomputed else 1.0
    return [count * share if stage in recomputed else count for stage, count in enumerate(in_flight(program))]


@lru_cache(maxsize=4)
def _share_of_layer_inputs(body: RangeCosts) -> float:
    kept = sum(body.graph.storage_bytes[root] for root in layers_policy(body.graph).checkpoints)
    return min(1.0, kept / max(float(body.saved_bytes[-1]), 1.0))


def approximate_seconds(
    bodies: Sequence[RangeCosts], cuts: Sequence[int], program: Program, cluster: Cluster, num_ranks: int
) -> float:
    """Return the makespan of a batch from range sums, without splitting the graph.

    `bodies` are the costs of the model on the device of every stage; `num_ranks` devices hold each stage.
    """
    ends = np.array([0, *cuts, bodies[0].size])
    spans = [(body, ends[stage], ends[stage + 1]) for stage, body in enumerate(bodies)]
    forward = np.array(
        [body.forward_seconds[stop] - body.forward_seconds[start] for body, start, stop in spans]
    )
    total = np.array([body.seconds[stop] - body.seconds[start] for body, start, stop in spans])
    total = np.maximum(total, forward)  # rounding may make differences of sums smaller
    placed = program.placement.rank_of_stage

    def transfer(source: int, target: int) -> float:
        num_bytes = float(bodies[0].boundary_bytes[ends[max(source, target)]]) / 2
        firsts = placed[source] * num_ranks, placed[target] * num_ranks
        return cluster.blocks_seconds(num_bytes, *firsts, num_ranks)

    backward = total - forward
    if cluster.kind != "cpu" and runtime_of(bodies[0].few).name == STAGEWRIGHT:  # its receivers wait
        for stage in range(1, len(placed)):
            if placed[stage - 1] != placed[stage]:
                seconds = transfer(stage - 1, stage)
                forward[stage] += seconds
                backward[stage - 1] += seconds
        return simulate(program, StageCosts.of(forward, backward, 0.0 * total)).makespan_s
    return simulate(program, StageCosts.of(forward, backward, 0.0 * total), transfer).makespan_s


def best_partition(
    body: RangeCosts, configuration: Configuration, cluster: Cluster, budget: MemoryBudget | None
) -> tuple[tuple[int, ...], float] | None:
    """Return the fastest of the partitions with the slacks of `SLACKS` and its makespan from range sums, or None if none
    stays within `budget`.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    program = make_program(configuration)
    width = configuration.ranks_per_stage
    bodies = stage_bodies(body, cluster, program, width)
    tried: dict[tuple[int, ...], float] = {}
    for slack in SLACKS if program.num_stages > 1 else SLACKS[:1]:
        cuts = partition(bodies, slack, budget) if budget else _unlimited_partition(tuple(bodies), slack)
        if cuts is not None and tuple(cuts) not in tried:
            tried[tuple(cuts)] = approximate_seconds(bodies, cuts, program, cluster, width)
    return min(tried.items(), key=lambda item: item[1]) if tried else None


@lru_cache(maxsize=64)
def _unlimited_partition(bodies: tuple[RangeCosts, ...], slack: float) -> list[int] | None:
    """Return the partition without a memory budget; cached, since schedules with equally many stages share it."""
    return partition(bodies, slack)


def fastest_partition(
    body: RangeCosts, configuration: Configuration, cluster: Cluster
) -> tuple[tuple[int, ...], float]:
    """Return the fastest partition regardless of memory, and its makespan from range sums; raises as `best_partition`."""
    best = best_partition(body, configuration, cluster, None)
    assert best is not None, "without a budget there is a partition"
    return best


def make_candidate(body: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job) -> Candidate:
    """Return the candidate with the partition that `configuration` or the runtime prescribes.

    Where neither prescribes one, the fastest partition if it fits the memory limit, otherwise that of `within_memory`.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    if is_cut_between_layers(configuration, job):
        return with_cuts(
            body,
            configuration,
            _cuts_between_layers(body.graph, configuration, make_program(configuration)),
            cluster,
            job,
        )
    start = fastest_partition(body, configuration, cluster)[0]
    return within_memory(with_cuts(body, configuration, start, cluster, job), body)


def faster_candidate(
    body: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job, below_s: float
) -> Candidate | None:
    """Return the candidate of `make_candidate`, or None where a step is known to take `below_s` or longer."""
    if not is_cut_between_layers(configuration, job):
        return make_candidate(body, configuration, cluster, job)
    cuts = _cuts_between_layers(body.graph, configuration, make_program(configuration))
    if takes_longer(body, configuration, cuts, cluster, job, below_s):
        return None
    return with_cuts(body, configuration, cuts, cluster, job)


def takes_longer(
    body: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    cluster: Cluster,
    job: Job,
    below_s: float,
) -> bool:
    """Return whether a step of this partition, on the best device order, is known to take `below_s` or longer.

    That is cheaper to find out than the memory of the ranks.
    """
    if configuration.level >= GRADIENTS or below_s == math.inf:
        return False
    line = with_program(body, configuration, cuts, make_program(configuration), cluster, job)
    if step_seconds(line) < below_s:
        return False
    placed_line = placed(line)[0]
    return placed_line is line or step_seconds(placed_line) >= below_s


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


def within_memory(start: Candidate, body: RangeCosts) -> Candidate:
    """Return `start` if it fits the memory limit, otherwise a partition that fits, or else the one over by least."""
    cluster, job = start.line.cluster, start.line.job
    best = latest = start
    if (
        start.excess_bytes > 0 and start.configuration.level >= GRADIENTS
    ):  # other units may fit where these do not
        best = latest = with_cuts(body, start.configuration, start.cuts, cluster, job)
    for _ in range(_MEMORY_ROUNDS):
        if best.excess_bytes <= 0:
            break
        fastest = best_partition(body, start.configuration, cluster, _budget(body, latest, job))
        if fastest is None or fastest[0] == latest.cuts:
            break
        latest = with_cuts(body, start.configuration, fastest[0], cluster, job)
        if latest.excess_bytes < best.excess_bytes:
            best = latest
    return best


def with_cuts(
    body: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    cluster: Cluster,
    job: Job,
) -> Candidate:
    """Return the candidate of `configuration` with the given cuts."""
    program = make_program(configuration)
    if configuration.level >= GRADIENTS:
        return _best_in_units(body, configuration, cuts, program, cluster, job)
    return of_line(configuration, cuts, _split_model(body, configuration, cuts, program, cluster, job))


def with_program(
    body: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> Pipeline:
    """Return the model cut at `cuts` under `program`, sharded as `configuration` asks."""
    if configuration.level >= GRADIENTS:
        return _best_in_units(body, configuration, cuts, program, cluster, job).line
    return _split_model(body, configuration, cuts, program, cluster, job)


def _split_model(
    body: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> Pipeline:
    if configuration.recompute == "model":
        return _as_chosen(
            as_model_says(body, cuts, program, cluster, job, configuration.num_holders), configuration
        )
    chosen = policies(configuration, program, body.graph)
    line = pipeline(body, cuts, program, cluster, job, configuration.num_holders, chosen)
    if configuration.recompute != "full" and any(policy.recomputes for policy in chosen):
        line = with_recomputation(line, program)
    return _as_chosen(line, configuration)


def _best_in_units(
    body: RangeCosts,
    configuration: Configuration,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
) -> Candidate:
    """Return the partition in the sharding units that `configuration` names, or in the fastest that fit.

    Where none fit, the smallest units are taken, which need the least memory.
    """

    def in_units(inside: Sequence[Sequence[int]]) -> Pipeline:
        every = sorted([*cuts, *(cut for unit_cuts in inside for cut in unit_cuts)])
        divided = subdivided(program, [len(unit_cuts) + 1 for unit_cuts in inside])
        return _split_model(body, configuration, every, divided, cluster, job)

    smallest, *larger = units_to_try(body, cuts, configuration.shard_units)
    smallest_line = in_units(smallest)
    least = of_line(configuration, cuts, smallest_line)
    if not larger:
        return least
    if least.excess_bytes > 0:
        if not _waits_for_network(body, configuration, cluster, job):
            return least
        candidates = (of_line(configuration, cuts, in_units(inside)) for inside in reversed(larger))
        return next(filter(_has_memory_for_state, candidates), least)
    for line in sorted([smallest_line, *map(in_units, larger)], key=step_seconds):
        candidate = least if line is smallest_line else of_line(configuration, cuts, line)
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
    times = float(configuration.num_microbatches)
    if configuration.schedule in _ALL_TOGETHER and not in_units:
        times = 1.0
    elif configuration.chunks is not None and not in_units:
        times = max(1.0, times / configuration.pp)
    wire = REDUCE_TYPES[configuration.reduce_dtype] if configuration.reduce_dtype else job.precision.gradient
    reductions = 1.0 if job.profile.reduces == "last microbatch" else times
    seconds = reductions * reduce_scatter_seconds(cluster, parameters * ITEM_BYTES[wire], holders)
    if configuration.level >= PARAMETERS:
        seconds += times * 2 * all_gather_seconds(cluster, parameters * ITEM_BYTES[job.torch_name], holders)
    return seconds


def _waits_for_network(body: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job) -> bool:
    """Return whether small units would make communication too long to be hidden by the computations."""
    parameters = float(body.parameter_bytes[-1]) / ITEM_BYTES[job.torch_name] / configuration.pp
    busy_s = float(body.seconds[-1]) * configuration.num_microbatches / configuration.pp
    return network_seconds(configuration, parameters, cluster, job, in_units=True) > _HIDDEN * busy_s


def _has_memory_for_state(candidate: Candidate) -> bool:
    """Return whether all ranks would fit if they saved almost nothing."""
    line = candidate.line
    return all(
        memory.peak_bytes - memory.categories.get("activations", 0)
        <= OF_STATE * line.allocatable_bytes(memory.rank)
        for memory in candidate.memories
    )


def under_program(
    line: Pipeline, configuration: Configuration, cuts: Sequence[int], program: Program
) -> Pipeline:
    """Return the partition of `line`, a result of `with_program` for `cuts`, under another program with the same memory
    policies."""
    ends = [*cuts, line.stages[-1].stop]
    numbers = Counter(bisect_left(ends, stage.stop) for stage in line.stages)
    divided = subdivided(program, [numbers[stage] for stage in range(program.num_stages)])
    changed = (
        with_recomputation(line, divided)
        if configuration.recompute == "model"
        else replace(line, program=divided)
    )
    return _as_chosen(changed, configuration)


def of_line(configuration: Configuration, cuts: Sequence[int], line: Pipeline) -> Candidate:
    """Return the candidate of `line` with the memory of its ranks.

    The stages of `line` are those between `cuts` or their sharding units; they keep or recompute everything, or recompute
    what the model's own code checkpoints.
    """
    memories = tuple(rank_memories(line))
    excess = line.missing_bytes(memories)
    return Candidate(configuration, line, tuple(cuts), memories, excess, _named(configuration, line))


def _as_chosen(line: Pipeline, configuration: Configuration) -> Pipeline:
    """Return `line` with the headroom, host optimizer and sharding of `configuration`."""
    line = replace(line, headroom=configuration.headroom)
    if configuration.host_optimizer:
        line = replace(line, host_optimizer=frozenset(range(line.pp)))
    if configuration.num_holders == 1:
        return line
    wire = None if configuration.reduce_dtype is None else REDUCE_TYPES[configuration.reduce_dtype]
    line = replace(line, reduce_dtype=wire)
    if configuration.zero is None:
        return line
    levels = (configuration.level,) * len(line.stages)
    held = around_layers(line) if configuration.level >= PARAMETERS and line.job.profile.keeps_root else ()
    once = line.job.profile.reduces == "last microbatch"
    program = sharded_program(line.program, line.stages, levels, held, reduces_once=once)
    return replace(line, program=program, sharding=levels, shard_size=configuration.shard_group)


def _named(
    configuration: Configuration, line: Pipeline
) -> tuple[Literal["keep", "layers", "selective"] | StagePolicy, ...]:
    """Return the policies of `policies`, or those of the model's own code, as plans name them."""
    if configuration.recompute == "model":
        return tuple(named_policy(stage) for stage in line.stages)
    if configuration.recompute == "selective":
        return ("selective",) * line.program.num_stages
    if configuration.recompute != "full":  # what the runtime always recomputes is no policy
        return ("keep",) * line.program.num_stages
    recomputed = {action.stage for action in line.program if action.kind is Kind.R}
    return tuple("layers" if stage in recomputed else "keep" for stage in range(line.program.num_stages))


def fitted_candidate(
    plain: Candidate, body: RangeCosts, *, offload: bool = True, thorough: bool = False
) -> Candidate | None:
    """Return `plain`, which keeps everything and does not fit, with some values recomputed or offloaded, or None if that is
    not enough. If `thorough`, operators may be recomputed several times."""
    fitted = fit(plain.line, body, offload=offload, thorough=thorough)
    if fitted is None:
        return None
    return replace(
        plain,
        line=fitted.line,
        memories=fitted.memories,
        excess_bytes=fitted.line.missing_bytes(fitted.memories),
        memory_policy=fitted.memory_policy,
    )


def fastest_fitted(
    kept: Sequence[Candidate],
    body: RangeCosts,
    *,
    offload: bool = True,
    below_s: float = math.inf,
    thorough: bool = False,
) -> Candidate | None:
    """Return the fastest partition including what it must recompute and offload, or None.

    The partitions of `kept`, which recompute and offload nothing, are tried too. None if no partition fits, or none is
    predicted to take less than `below_s` per batch.
    """
    first, configuration = kept[0], kept[0].configuration
    by_cuts = {candidate.cuts: candidate for candidate in kept}
    whole = _whole_stages(first, body) if first.cuts else None
    for shrink in _SHRINKS if first.cuts else _SHRINKS[:1]:
        tried = [()] if whole is None else cuts_to_try(
            whole, first.memories, body, () if shrink else by_cuts,
            state_share=configuration.state_share(whole.job.precision), offload=offload, shrink=shrink, below_s=below_s,
        )  # fmt: skip
        for cuts in tried[:_MOST_FITTED]:
            plain = by_cuts.get(cuts) or with_cuts(
                body, configuration, cuts, first.line.cluster, first.line.job
            )
            fitted = fitted_candidate(plain, body, offload=offload, thorough=thorough)
            if fitted is not None:
                return fitted
    return None


def _whole_stages(candidate: Candidate, body: RangeCosts) -> Pipeline:
    """Return the stages of a candidate's schedule, not divided into sharding units."""
    if len(candidate.line.stages) == len(candidate.cuts) + 1:
        return candidate.line
    configuration, line = candidate.configuration, candidate.line
    return with_program(
        body,
        replace(configuration, shard_units=1),
        candidate.cuts,
        make_program(configuration),
        line.cluster,
        line.job,
    )


def _budget(body: RangeCosts, tried: Candidate, job: Job) -> MemoryBudget:
    """Return the bytes of state and saved values that each stage may have, if it needs as much besides as in `tried`."""
    program = make_program(tried.configuration)
    counts = saved_counts(program, body)
    ends = np.array([0, *tried.cuts, body.size])
    share = tried.configuration.state_share(job.precision)
    stage_bytes = share * np.diff(body.state_bytes[ends]) + np.array(counts) * np.diff(body.saved_bytes[ends])
    allowed = [0.0] * program.num_stages
    for memory in tried.memories:
        stages = program.placement.stages_of(memory.rank)
        line = tried.line
        spare = line.usable_bytes(memory.rank) - reserved_bytes(memory, line.device_of(memory.rank))
        for stage in stages:
            allowed[stage] = float(stage_bytes[stage]) + spare / len(stages)
    return MemoryBudget(allowed, counts, share)


def make_plan(candidate: Candidate, body: RangeCosts, reference: ModelReference) -> Plan:
    """Return the plan of a candidate, with its predictions."""
    configuration, cluster = candidate.configuration, candidate.line.cluster
    line, devices = placed(candidate.line)
    program = line.program
    cuts = cut_names(body.graph, [stage.start for stage in line.stages[1:]])
    is_run = line.job.runtime == STAGEWRIGHT
    return Plan(
        stagewright=__version__,
        model=ModelSection.of(reference, body.graph),
        job=line.job,
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
        graph=graph_section(body.graph, cuts, candidate.memory_policy) if is_run else None,
        sharding=(configuration.level,) * program.num_stages,  # type: ignore[arg-type]
        reduce_dtype=configuration.reduce_dtype if configuration.num_holders > 1 else None,
        shard_size=configuration.shard_group,
        host_optimizer=tuple(sorted(line.host_optimizer)),
        predictions=predict(line, body, candidate.memories),
    )
