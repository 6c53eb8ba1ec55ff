"""Repartitioning of a pipeline, so that ranks that do not fit lose as little time as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from stagewright.arrays import Floats
from stagewright.cluster import Device
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.partition.bisection import bisect, bottleneck
from stagewright.planning.partition.ranges import Ranges, ranges_of
from stagewright.planning.partition.refine import best_partition, narrowed
from stagewright.planning.partition.stage_ranges import StageRanges, StageTerms
from stagewright.planning.prediction.staged_model import StagedModel, costs_by_stage
from stagewright.planning.prediction.transfers import message_seconds
from stagewright.schedule import Program
from stagewright.schedule.builders.asynchronous import weight_versions
from stagewright.schedule.in_flight import in_flight
from stagewright.simulation import StageCosts, simulate

_SLACKS = (0.01, 0.03, 0.1)
"""Slowdowns of the slowest stage that are accepted in exchange for smaller boundaries; all are tried."""

_PROBE_BYTES = 1e9
"""Bytes of the message from which the time per byte is computed."""


def cuts_to_try(
    staged: StagedModel,
    memories: Sequence[RankMemory],
    model_costs: RangeCosts,
    others: Iterable[tuple[int, ...]],
    *,
    state_bytes: Floats | None = None,
    offload: bool = True,
    shrink: float = 0.0,
    below_s: float = math.inf,
) -> list[tuple[int, ...]]:
    """Return partitions that fit, the fastest first, by a simulation in which stages recompute and offload to fit.

    They are `others`, the partition of least bottleneck, and nearly as good ones with smaller boundaries.

    Args:
        staged: any partition that keeps everything; the error of the ranges for its `memories` is corrected everywhere.
        state_bytes: state that a rank keeps, as prefix sums; by default all.
        shrink: fraction of the memory to leave free.
        below_s: partitions whose batches take as long or longer are left out.
    """
    terms = terms_of(staged, model_costs, offload=offload)
    stage_ranges = corrected(
        staged, memories, StageRanges(known_ranges(model_costs, state_bytes), terms), shrink
    )
    fastest = best_partition(stage_ranges)
    tried = set(others)
    if fastest is not None:
        tried |= {fastest.cuts, *(narrowed(stage_ranges, fastest, slack).cuts for slack in _SLACKS)}
    seconds = {cuts: _makespan(staged.program, stage_ranges, cuts) for cuts in tried}
    return sorted((cuts for cuts in tried if seconds[cuts] < below_s), key=lambda cuts: seconds[cuts])


@dataclass(frozen=True)
class Within:
    """Cuts that fit, the seconds of a batch with them, and the average compute seconds of a rank."""

    cuts: tuple[int, ...]
    seconds: float
    busy_s: float


def stage_ranges_of(
    stage_costs: Sequence[RangeCosts],
    capacities: Sequence[float],
    counts: Sequence[float],
    between: Callable[[int, int, float], float],
    *,
    state_bytes: Floats,
    offload: bool,
) -> StageRanges:
    """Return the ranges of stages that recompute and offload as necessary.

    Args:
        stage_costs: the costs of the model on the device of every stage.
        capacities: bytes of every stage; `counts`: sets of saved values that it has in flight.
        between: seconds of a message from a stage to another, by its bytes.
        state_bytes: state that a rank keeps, as prefix sums.

    Ignores: memory that ranges do not include.
    """
    model_costs, last = stage_costs[0], len(stage_costs) - 1
    terms = [
        StageTerms(
            copies=count,
            capacity=capacity,
            inverse_speed=float(own_costs.seconds[-1] / model_costs.seconds[-1]),
            link_s_per_byte=_link_seconds(own_costs.device) if offload else math.inf,
            boundary_s_per_byte=between(stage, min(stage + 1, last), _PROBE_BYTES) / _PROBE_BYTES / 2,
        )
        for stage, (own_costs, capacity, count) in enumerate(
            zip(stage_costs, capacities, counts, strict=True)
        )
    ]
    return StageRanges(known_ranges(model_costs, state_bytes), terms)


def partition_within(program: Program, stage_ranges: StageRanges, cuts: tuple[int, ...]) -> Within | None:
    """Return `cuts` or, where these do not fit, the cuts of least bottleneck that do; None if nothing fits."""
    if stage_ranges.least_bytes() > sum(terms.capacity for terms in stage_ranges.terms):
        return None
    if (shared := _shared(program, stage_ranges, cuts)) is not None:
        return _at_cuts(program, shared, cuts)
    if not math.isfinite(bottleneck(stage_ranges, cuts)):
        if (partition := bisect(stage_ranges)) is None:
            return None
        cuts = partition.cuts
    return _at_cuts(program, stage_ranges, cuts)


def recomputed_within(program: Program, stage_ranges: StageRanges, cuts: tuple[int, ...]) -> Within:
    """Return `cuts` as if stages that recompute everything always fit."""
    spans = pairwise([0, *cuts, stage_ranges.ranges.size])
    least = [stage_ranges.least_capacity(stage, *span) for stage, span in enumerate(spans)]
    terms = [
        replace(terms, capacity=max(terms.capacity, enough))
        for terms, enough in zip(stage_ranges.terms, least, strict=True)
    ]
    return _at_cuts(program, StageRanges(stage_ranges.ranges, terms), cuts)


def _shared(program: Program, stage_ranges: StageRanges, cuts: tuple[int, ...]) -> StageRanges | None:
    """Return `stage_ranges` with the memory of every rank divided among its stages as takes least time at `cuts`; None where
    a rank lacks memory, and with offloading."""
    if any(math.isfinite(terms.link_s_per_byte) for terms in stage_ranges.terms):
        return None
    spans = list(pairwise([0, *cuts, stage_ranges.ranges.size]))
    terms = list(stage_ranges.terms)
    for rank in range(program.num_ranks):
        stages = program.placement.stages_of(rank)
        capacities = stage_ranges.shared({stage: spans[stage] for stage in stages})
        if capacities is None:
            return None
        for stage, capacity in capacities.items():
            terms[stage] = replace(terms[stage], capacity=capacity)
    return StageRanges(stage_ranges.ranges, terms)


def _at_cuts(program: Program, stage_ranges: StageRanges, cuts: tuple[int, ...]) -> Within:
    spans = pairwise([0, *cuts, stage_ranges.ranges.size])
    once_s = sum(stage_ranges.cost(stage, *span) for stage, span in enumerate(spans))
    busy_s = once_s * program.num_microbatches / program.num_ranks
    return Within(cuts, _makespan(program, stage_ranges, cuts), busy_s)


def _makespan(program: Program, stage_ranges: StageRanges, cuts: tuple[int, ...]) -> float:
    """Return the makespan of a batch from costs of ranges; infinite where a stage does not fit. Ignores: that receivers on
    GPUs wait for transfers."""
    if not math.isfinite(bottleneck(stage_ranges, cuts)):
        return math.inf
    ends = [0, *cuts, stage_ranges.ranges.size]
    stages = range(stage_ranges.num_stages)
    forward_seconds = stage_ranges.ranges.forward_seconds
    total = [stage_ranges.cost(stage, ends[stage], ends[stage + 1]) for stage in stages]
    forward = [float(forward_seconds[ends[stage + 1]] - forward_seconds[ends[stage]]) for stage in stages]
    # Rounding could make the backward of a stage that has none negative.
    backward = [max(whole - first, 0.0) for whole, first in zip(total, forward, strict=True)]
    costs = StageCosts.of(forward, backward, [0.0] * len(forward))

    def between(source: int, target: int) -> float:
        return stage_ranges.transfer_seconds(min(source, target), ends[max(source, target)])

    return simulate(program, costs, between).makespan_s


def terms_of(staged: StagedModel, model_costs: RangeCosts, *, offload: bool = True) -> list[StageTerms]:
    """Return the terms of every stage of `staged`, a partition of `model_costs`; stages of one rank share its memory evenly.

    Ignores: that a device may be slower at some operators than at others.
    """
    program = staged.program
    versions, counts = weight_versions(program), in_flight(program)
    placed = program.placement
    devices = [staged.device_of(rank) for rank in range(staged.pp)]
    stage_costs = costs_by_stage(model_costs, staged.cluster, program, staged.ranks_per_stage)
    sharing = [len(placed.stages_of(rank)) for rank in placed.rank_of_stage]
    return [
        StageTerms(
            copies=counts[stage],
            capacity=staged.allocatable_bytes(rank) / sharing[stage],
            versions=versions[rank],
            inverse_speed=float(stage_costs[stage].seconds[-1] / model_costs.seconds[-1]),
            link_s_per_byte=_link_seconds(devices[rank]) if offload else math.inf,
            boundary_s_per_byte=_boundary_seconds(staged, stage),
        )
        for stage, rank in enumerate(placed.rank_of_stage)
    ]


def _link_seconds(device: Device) -> float:
    """Return the seconds per byte to the host; infinite if the device shares its memory."""
    return math.inf if device.shares_host_memory else 1 / device.host_link_bandwidth


def _boundary_seconds(staged: StagedModel, stage: int) -> float:
    """Return the seconds per byte that crosses the end of a stage; half of the bytes go each way, at the same time."""
    if stage + 1 == len(staged.stages):
        return 0.0
    return message_seconds(staged, stage, stage + 1, _PROBE_BYTES) / _PROBE_BYTES / 2


def corrected(
    staged: StagedModel, memories: Sequence[RankMemory], stage_ranges: StageRanges, shrink: float = 0.0
) -> StageRanges:
    """Return `stage_ranges` with capacities reduced by memory that ranges do not include: inputs, buffers and the like."""
    ends = [stage.start for stage in staged.stages] + [stage_ranges.ranges.size]
    terms = list(stage_ranges.terms)
    for memory in memories:
        stages = staged.program.placement.stages_of(memory.rank)
        seen = sum(stage_ranges.demand(stage, ends[stage], ends[stage + 1]) for stage in stages)
        unseen = (memory.peak_bytes - seen) / len(stages)
        for stage in stages:
            capacity = terms[stage].capacity * (1 - shrink) - unseen
            terms[stage] = replace(terms[stage], capacity=capacity)
    return StageRanges(stage_ranges.ranges, terms)


def known_ranges(model_costs: RangeCosts, state_bytes: Floats | None = None) -> Ranges:
    """Return the ranges of a model of whose state a rank keeps `state_bytes`, by default all; the rest is computed once."""
    ranges = _ranges_of(model_costs)
    return ranges if state_bytes is None else replace(ranges, state_bytes=state_bytes)


_ranges_of = lru_cache(maxsize=64)(ranges_of)
