"""A model split into stages for a program, with the costs, memory and sharding of every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

from stagewright.cluster import Cluster, Device
from stagewright.estimation.communicators import group_bytes, lane_bytes
from stagewright.estimation.memory import RankMemory, stage_edges
from stagewright.estimation.optimizer import OptimizerState
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.stages import RangeCosts, StageSummary, summarise
from stagewright.estimation.state import ResidentBytes, resident_bytes
from stagewright.estimation.time import Costing
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import FlatLayout, flats
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.repeat import IrregularLayers, copies_of, expanded
from stagewright.graph.split import SplitGraph
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import parallelism, tensor_parallel_size
from stagewright.planning.job import Job
from stagewright.planning.prediction.sharding import Collectives, HostCopies, reduced_flats
from stagewright.schedule import Kind, Program
from stagewright.schedule.builders.asynchronous import weight_versions
from stagewright.schedule.in_flight import changes
from stagewright.schedule.lanes import Lane
from stagewright.schedule.lower import receives_ahead

_SEGMENT_BYTES = 2 * 2**20  # the smallest block that PyTorch's CUDA allocator takes from the driver


@dataclass(frozen=True)
class StagedModel:
    """A split model with the program that runs it on `cluster`."""

    memories: tuple[StageMemory, ...]
    summaries: tuple[StageSummary, ...]
    program: Program
    cluster: Cluster
    job: Job
    num_holders: int
    """Number of ranks that hold the same parameters: replicas times context parallel ranks."""
    split: SplitGraph
    sharding: tuple[int, ...] = ()
    """ZeRO stage of every stage; empty: 0 for all."""
    reduce_dtype: str | None = None
    """Type in which gradients are reduced over replicas, as torch names it; None is that of the gradients."""
    shard_size: int | None = None
    """Shard group size; groups are replicas of each other (hybrid sharding). None is all replicas."""
    host_optimizer: frozenset[int] = frozenset()
    """Pipeline ranks whose optimizer state is on the host."""
    is_streamed: bool = False
    """Whether the weights of stages are in host memory, from where they are copied to the device before use."""
    headroom: int = 0
    """Bytes that every device leaves free."""
    tp: int = 1
    """Number of tensor parallel ranks; `memories` and `summaries` are those of one of them."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether the tensor parallel ranks use sequence parallelism."""
        degrees = parallelism(self.stages[0].graph)
        return degrees is not None and degrees.sequence

    @property
    def uses_lanes(self) -> bool:
        """Whether transfers run on lanes of GPUs."""
        return self.job.uses_lanes(self.cluster)

    @property
    def receives_ahead(self) -> int:
        """Number of computations by which a receive is posted ahead of the one that uses it."""
        return receives_ahead(self.uses_lanes)

    @cached_property
    def flats(self) -> tuple[FlatLayout, ...]:
        """The flat buffers of all stages; none where there is one replica whose weights stay on its devices."""
        levels = self.sharding or (0,) * len(self.memories)
        copies = self.num_holders // self.num_shards
        if self.num_holders == 1 and not self.is_streamed:
            return ()
        on_host = self.updated_on_host if self.is_streamed else None
        return flats(self.stages, levels, self.num_shards, copies, self.job.least_decayed_dims, on_host)

    @property
    def updated_on_host(self) -> frozenset[int]:
        """Stages whose optimizer is on the host."""
        return self.program.placement.stages_on(self.host_optimizer)

    @property
    def num_shards(self) -> int:
        """Number of replicas in a shard group."""
        return self.shard_size or self.num_holders

    def collectives(self, stage: int) -> Collectives | HostCopies:
        """Return the collectives of the replicas of a stage, or the copies in their place where weights are streamed."""
        rank = self.program.placement.rank_of_stage[stage]
        if self.is_streamed:
            host = self.cluster.group_of(self.first_rank(rank)).host
            return HostCopies(self.device_of(rank), host, self.job.profile)
        return Collectives(self.cluster, self.replicas(rank), self.reduce_dtype, self.job.profile)

    def reduce_seconds(self, stage: int) -> float:
        """Return the seconds of REDUCE of a stage."""
        placement = self.program.placement
        of_rank = placement.stages_of(placement.rank_of_stage[stage])
        return self.collectives(stage).reduce(reduced_flats(self.flats, stage, of_rank))

    @cached_property
    def _weight_versions(self) -> list[int]:
        return weight_versions(self.program)

    @cached_property
    def _resident(self) -> dict[int, ResidentBytes]:
        return {}

    def resident(self, pipeline_rank: int) -> ResidentBytes:
        """Return the bytes that a rank keeps from step to step."""
        if pipeline_rank not in self._resident:
            self._resident[pipeline_rank] = self._resident_of(pipeline_rank)
        return self._resident[pipeline_rank]

    def _resident_of(self, pipeline_rank: int) -> ResidentBytes:
        on_host = pipeline_rank in self.host_optimizer
        memories = [self.memories[stage] for stage in self.program.placement.stages_of(pipeline_rank)]
        device = self.device_of(pipeline_rank)
        resident = resident_bytes(
            memories, self.flats, self.reduce_dtype, host_optimizer=on_host,
            thread_bytes=device.allocated_workspace_bytes,
            kernel_bytes=device.recommended_workspace_bytes,
        )  # fmt: skip
        resident = replace(resident, has_slots=self.uses_lanes)
        return resident.with_versions(self._weight_versions[pipeline_rank])

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(memory.stage for memory in self.memories)

    @property
    def pp(self) -> int:
        return self.program.num_ranks

    @property
    def ranks_per_stage(self) -> int:
        """Number of global ranks that hold a stage: each of the replicas is divided among tensor parallel ranks."""
        return self.num_holders * self.tp

    def replicas(self, pipeline_rank: int) -> range:
        """Return the global ranks that hold the same parameters."""
        first = self.first_rank(pipeline_rank)
        return range(first, first + self.ranks_per_stage, self.tp)

    def first_rank(self, pipeline_rank: int) -> int:
        """Return the first of the global ranks that hold the stages of a pipeline rank."""
        return pipeline_rank * self.ranks_per_stage

    def device_of(self, pipeline_rank: int) -> Device:
        """Return the device of a pipeline rank; of several kinds the one with the least memory, of equals the one slowest at
        matmuls, then at memory, then the first."""
        if self.cluster.is_homogeneous:
            return self.cluster.device
        dtype = self.job.computed_in
        return min(
            self.cluster.kinds_of(self.replicas(pipeline_rank)),
            key=lambda kind: (kind.usable_bytes, kind.peak_flops.get(dtype) or 0.0, kind.memory_bandwidth),
        )

    def missing_bytes(self, memories: Iterable[RankMemory]) -> int:
        """Return by how many bytes the fullest rank is over its memory; if it is not, minus its headroom."""
        return max(
            reserved_bytes(memory, self.device_of(memory.rank)) - self.usable_bytes(memory.rank)
            for memory in memories
        )

    def usable_bytes(self, pipeline_rank: int) -> int:
        """Return the bytes that the allocator of a pipeline rank may reserve."""
        device, communicators = self.device_of(pipeline_rank), self.communicator_bytes[pipeline_rank]
        return self.job.usable_bytes(device, self.cluster, communicators) - self.headroom

    @cached_property
    def communicator_bytes(self) -> tuple[int, ...]:
        """Bytes of a GPU that communicators of Stagewright's own runtime take, per pipeline rank; 0 on CPUs, and for other
        runtimes, as the reserve of a device includes theirs."""
        if not self.uses_lanes:
            return (0,) * self.pp
        firsts = [self.first_rank(rank) for rank in range(self.pp)]
        all_ranks = range(self.pp * self.ranks_per_stage)
        first_replica = [first + part for first in firsts for part in range(self.tp)]
        lanes, tied = self.lanes, {tuple(ranks) for ranks in self.holders.values() if len(ranks) > 1}
        sizes = []
        for rank, first in enumerate(firsts):
            replicas = self.replicas(rank)
            shards = replicas[: self.num_shards]
            # Gathers and reductions have separate communicators.
            groups = [shards, shards, replicas[:: self.num_shards], range(first, first + self.tp)]
            groups += [[firsts[holder] for holder in holders] for holders in tied if rank in holders]
            collectives = sum(group_bytes(group, self.cluster) for group in groups)
            collectives += sum(
                group_bytes(group, self.cluster, is_small=True) for group in (all_ranks, first_replica)
            )
            sizes.append(lane_bytes(lanes, rank, self.cluster, firsts) + collectives)
        return tuple(sizes)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of the transfers."""
        placed = self.program.placement.rank_of_stage
        ends = [(placed[low], placed[high]) for low, high in stage_edges(self.stages)]
        forward = {Lane(Kind.F, source, target) for source, target in ends if source != target}
        return sorted(forward | {Lane(Kind.B, lane.target, lane.source) for lane in forward})

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """Trained parameter -> the pipeline ranks that hold it, in order."""
        holders: dict[int, list[int]] = {}
        for rank in range(self.pp):
            trained = dict.fromkeys(value for stage in self.stages_of(rank) for value, _ in stage.gradients)
            for value in trained:
                holders.setdefault(value, []).append(rank)
        return holders

    def allocatable_bytes(self, pipeline_rank: int) -> int:
        """Return the maximum bytes that a rank may have alive so that its `reserved_bytes` stay within its memory."""
        return allocatable_bytes(self.usable_bytes(pipeline_rank), self.device_of(pipeline_rank))

    def offloaded_bytes(self, pipeline_rank: int) -> int:
        """Return the maximum bytes of offloaded values of a rank at once, each from F to the end of the backward."""
        sizes = [summary.offloaded_bytes for summary in self.summaries]
        if not any(sizes[stage] for stage in self.program.placement.stages_of(pipeline_rank)):
            return 0
        actions = self.program.actions(pipeline_rank)
        return max(accumulate((change * sizes[stage] for stage, change in changes(actions)), initial=0))

    def stages_of(self, pipeline_rank: int) -> list[Stage]:
        return [self.stages[stage] for stage in self.program.placement.stages_of(pipeline_rank)]


def staged_model(
    model_costs: RangeCosts,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
    num_holders: int,
    policies: Sequence[Policy] = (),
) -> StagedModel:
    """Return the model of `model_costs` cut at `cuts`; raises `PlanError` for cuts that the graph refuses."""
    hands_over = job.compiled and job.profile.compiles == "model" and program.num_microbatches > 1
    split, memories = _split(model_costs, tuple(cuts), tuple(policies), hands_over)
    tp = tensor_parallel_size(model_costs.graph)
    if cluster.is_homogeneous:
        summaries = _summaries(model_costs, tuple(cuts), tuple(policies), hands_over)
    else:
        stage_costs = costs_by_stage(model_costs, cluster, program, num_holders * tp)
        summaries = tuple(map(summarise, memories, (costs.costing for costs in stage_costs)))
    return StagedModel(memories, summaries, program, cluster, job, num_holders, split, tp=tp)


@lru_cache(maxsize=16)
def _split(
    model_costs: RangeCosts, cuts: tuple[int, ...], policies: tuple[Policy, ...], hands_over: bool
) -> tuple[SplitGraph, tuple[StageMemory, ...]]:
    """Split a graph; cached, as configurations that differ in schedule, microbatches or sharding have the same stages."""
    split = SplitGraph(model_costs.graph, cuts)
    return split, tuple(StageMemory(stage, hands_over) for stage in split.stages(policies))


@lru_cache(maxsize=16)
def _summaries(
    model_costs: RangeCosts, cuts: tuple[int, ...], policies: tuple[Policy, ...], hands_over: bool
) -> tuple[StageSummary, ...]:
    """Return the summary of every stage on the devices of `model_costs`."""
    return tuple(
        summarise(memory, model_costs.costing)
        for memory in _split(model_costs, cuts, policies, hands_over)[1]
    )


_StageUnderPolicy = tuple[StageMemory, StageSummary]

_BY_POLICY: WeakKeyDictionary[SplitGraph, dict[tuple[int, Policy, Costing], _StageUnderPolicy]] = (
    WeakKeyDictionary()
)
"""Stages of each split graph under their policies, which searches of a partition with less memory or more microbatches
share."""


class Variants:
    """A partition under different memory policies; a stage is built once for each of its policies.

    Args:
        staged: the partition with all values kept.
    """

    def __init__(self, staged: StagedModel, model_costs: RangeCosts) -> None:
        self.staged = staged
        self._stage_costs = costs_by_stage(
            model_costs, staged.cluster, staged.program, staged.ranks_per_stage
        )
        self._kept = tuple(zip(staged.memories, staged.summaries, strict=True))
        self._by_policy = _BY_POLICY.setdefault(staged.split, {})

    def under(self, program: Program, policies: Sequence[Policy]) -> StagedModel:
        """Return the partition under `program`, which has the same placement, with a policy for every stage."""
        memories, summaries = zip(*(self._stage(*key) for key in enumerate(policies)), strict=True)
        return replace(self.staged, memories=memories, summaries=summaries, program=program)

    def _stage(self, index: int, policy: Policy) -> _StageUnderPolicy:
        if policy == KEEP:
            return self._kept[index]
        costing = self._stage_costs[index].costing
        stage = self._by_policy.get((index, policy, costing))
        if stage is None:
            hands_over = self.staged.memories[index].hands_over
            memory = StageMemory(self.staged.split.stage(index, policy), hands_over)
            stage = self._by_policy[index, policy, costing] = memory, summarise(memory, costing)
        return stage


def costs_by_stage(
    model_costs: RangeCosts, cluster: Cluster, program: Program, ranks_per_stage: int
) -> list[RangeCosts]:
    """Return the costs of the model on the rank of every stage, as `costs_by_rank` does."""
    stage_costs = costs_by_rank(model_costs, cluster, program.num_ranks, ranks_per_stage)
    return [stage_costs[rank] for rank in program.placement.rank_of_stage]


def costs_by_rank(
    model_costs: RangeCosts, cluster: Cluster, num_ranks: int, ranks_per_stage: int
) -> list[RangeCosts]:
    """Return the costs of the model on every pipeline rank, of `ranks_per_stage` devices: those of its slowest device."""
    if cluster.is_homogeneous:
        return [model_costs] * num_ranks
    firsts = range(0, num_ranks * ranks_per_stage, ranks_per_stage)
    kinds = (cluster.kinds_of(range(first, first + ranks_per_stage)) for first in firsts)
    return [
        max(map(model_costs.on, rank_kinds), key=lambda costs: float(costs.seconds[-1]))
        for rank_kinds in kinds
    ]


def costing(graph: OperatorGraph, cluster: Cluster, job: Job) -> Costing:
    """Return the costs of the operators of `graph` as `job` computes them on the devices of `cluster`; on those of the first
    kind if there are several.

    Raises:
        InputError: a device has no figures for the precision of the job's matmuls.
    """
    if job.matmul_precision is not None:
        for group in cluster.nodes:
            group.device.matmul_flops(job.matmul_precision)
    return Costing(graph, cluster.nodes[0].device, cluster, job.matmul_precision, job.compiled)


def costs_of_model(graph: OperatorGraph, cluster: Cluster, job: Job) -> RangeCosts:
    """Return the costs of ranges of operators of `graph`, as the job's runtime runs it and with all its layers.

    Raises as `costing`. The most recent results are cached by graph, cluster, runtime and precision.
    """
    request = _CostsRequest(graph, cluster, job.runtime, job.matmul_precision, job.compiled, job.kept)
    for earlier, model_costs in tuple(_RECENT):
        if earlier.graph is request.graph and earlier[1:] == request[1:]:
            return model_costs
    few = job.rewritten(graph)
    try:
        copies = copies_of(few)
    except IrregularLayers:  # a kernel reaches from one layer into the next
        few, copies = job.rewritten(expanded(graph)), None
    model_costs = RangeCosts(few, costing(few, cluster, job), copies)
    _RECENT.append((request, model_costs))
    return model_costs


class _CostsRequest(NamedTuple):
    graph: OperatorGraph
    cluster: Cluster
    runtime: str
    matmul_precision: str | None
    compiled: bool
    kept: OptimizerState


_RECENT: deque[tuple[_CostsRequest, RangeCosts]] = deque(maxlen=8)
"""The latest requests: configurations of one model that differ in schedule, stages or sharding share their costs."""


def allocated_bytes(memory: RankMemory, device: Device) -> int:
    """Return the bytes alive at the peak; on a GPU including the matrix library's workspace."""
    return memory.peak_bytes + device.allocated_workspace_bytes


def reserved_bytes(memory: RankMemory, device: Device) -> int:
    """Return the minimum that the allocator of `device` holds at the peak; on a GPU in whole segments.

    Ignores: fragmentation, for which `reserved_peaks` replays the allocator and a device's `reserve_fraction` leaves
    headroom.
    """
    total = allocated_bytes(memory, device)
    return total if device.kind == "cpu" else -(-total // _SEGMENT_BYTES) * _SEGMENT_BYTES


def allocatable_bytes(limit: int, device: Device) -> int:
    """Return the maximum bytes that a rank on `device` may have alive so that its `reserved_bytes` stay within `limit`."""
    if device.kind == "cpu":
        return limit
    return limit // _SEGMENT_BYTES * _SEGMENT_BYTES - device.workspace_bytes
