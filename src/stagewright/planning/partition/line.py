"""A pipeline cut anew, so that ranks that lack memory pay for it with as little time as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stagewright.cluster import Device
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.partition.bisection import bisect, bottleneck
from stagewright.planning.partition.leaves import Leaves, Terms
from stagewright.planning.partition.ranges import Ranges, ranges_of
from stagewright.planning.partition.refine import best_partition, narrowed
from stagewright.planning.prediction.pipeline import Pipeline, bodies_of
from stagewright.planning.prediction.transfers import message_seconds
from stagewright.schedule import Program
from stagewright.schedule.families.asynchronous import weight_versions
from stagewright.simulation import StageCosts, simulate

_SLACKS = (0.01, 0.03, 0.1)
"""How much slower than necessary the slowest stage may be for narrow boundaries; all are tried."""

_PROBE_BYTES = 1e9
"""What is sent to learn the time per byte."""


def cuts_to_try(
    line: Pipeline,
    memories: Sequence[RankMemory],
    body: RangeCosts,
    counts: Sequence[int],
    others: Iterable[tuple[int, ...]],
    *,
    state_share: float = 1.0,
    offload: bool = True,
    shrink: float = 0.0,
    below_s: float = math.inf,
) -> list[tuple[int, ...]]:
    """Partitions, the fastest first, by a simulation in which stages that do not fit recompute and offload: `others`, the
    one of least bottleneck, and those with narrower boundaries that are nearly as good. Without those that cannot fit.

    Args:
        line: any partition that keeps everything; how far the ranges misjudge its `memories` is made good everywhere.
        counts: per stage, the most sets of saved values in flight.
        state_share: part of the state of a stage that one replica keeps.
        shrink: part of the memory to leave free.
        below_s: batches that take as long or longer are left out.
    """
    terms = terms_of(line, body, counts, state_share=state_share, offload=offload)
    leaves = corrected(line, memories, Leaves(known_ranges(body), terms), shrink)
    found = best_partition(leaves)
    tried = set(others)
    if found is not None:
        tried |= {found.cuts, *(narrowed(leaves, found, slack).cuts for slack in _SLACKS)}
    seconds = {cuts: _makespan(line.program, leaves, cuts) for cuts in tried}
    return sorted((cuts for cuts in tried if seconds[cuts] < below_s), key=lambda cuts: seconds[cuts])


@dataclass(frozen=True)
class Within:
    """Cuts that fit, what a batch takes with these, and for how long of it a rank computes on the average."""

    cuts: tuple[int, ...]
    seconds: float
    busy_s: float


def partition_within(
    bodies: Sequence[RangeCosts],
    program: Program,
    cuts: tuple[int, ...],
    capacities: Sequence[float],
    counts: Sequence[float],
    between: Callable[[int, int, float], float],
    *,
    state_share: float,
    offload: bool,
) -> Within | None:
    """`cuts` or, where these do not fit, cuts of least bottleneck that do, and what a batch takes if stages recompute and
    offload what they must; None if nothing fits.

    Args:
        bodies: the costs of the model on the device of every stage.
        capacities: bytes of every stage; `counts`: sets of saved values that it has in flight.
        between: seconds of a message of so many bytes from a stage to another.

    Ignores: what ranges do not see.
    """
    body, last = bodies[0], len(bodies) - 1
    terms = [
        Terms(
            copies=count,
            capacity=capacity,
            slowness=float(own.seconds[-1] / body.seconds[-1]),
            link_s_per_byte=_link_seconds(own.device) if offload else math.inf,
            boundary_s_per_byte=between(stage, min(stage + 1, last), _PROBE_BYTES) / _PROBE_BYTES / 2,
            state_share=state_share,
        )
        for stage, (own, capacity, count) in enumerate(zip(bodies, capacities, counts, strict=True))
    ]
    leaves = Leaves(known_ranges(body), terms)
    if leaves.least_bytes() > sum(capacities):
        return None
    seconds = _makespan(program, leaves, cuts)
    if not math.isfinite(seconds):
        if (found := bisect(leaves)) is None:
            return None
        cuts, seconds = found.cuts, _makespan(program, leaves, found.cuts)
    ends = [0, *cuts, leaves.ranges.size]
    once_s = sum(leaves.cost(stage, *ends[stage : stage + 2]) for stage in range(len(bodies)))
    return Within(cuts, seconds, once_s * program.num_microbatches / program.num_ranks)


def _makespan(program: Program, leaves: Leaves, cuts: tuple[int, ...]) -> float:
    """Of a batch, from costs of ranges; infinite where a stage does not fit. Ignores: that receivers on GPUs wait for
    transfers."""
    if not math.isfinite(bottleneck(leaves, cuts)):
        return math.inf
    ends = [0, *cuts, leaves.ranges.size]
    stages = range(leaves.num_stages)
    forward_seconds = leaves.ranges.forward_seconds
    total = [leaves.cost(stage, ends[stage], ends[stage + 1]) for stage in stages]
    forward = [float(forward_seconds[ends[stage + 1]] - forward_seconds[ends[stage]]) for stage in stages]
    # Of a stage that has no backward, rounding would leave less than nothing.
    backward = [max(whole - first, 0.0) for whole, first in zip(total, forward, strict=True)]
    costs = StageCosts.of(forward, backward, [0.0] * len(forward))

    def between(source: int, target: int) -> float:
        return leaves.transfer_seconds(min(source, target), ends[max(source, target)])

    return simulate(program, costs, between).makespan_s


def terms_of(
    line: Pipeline, body: RangeCosts, counts: Sequence[int], *, state_share: float = 1.0, offload: bool = True
) -> list[Terms]:
    """What every stage of `line`, a partition of `body`, has to cope with; stages of one rank share its memory evenly.

    Ignores: that a device may be slower at some operators than at others.
    """
    program = line.program
    versions = weight_versions(program)
    placed = program.placement
    devices = [line.device_of(rank) for rank in range(line.pp)]
    bodies = bodies_of(body, line.cluster, line.pp, line.num_holders * line.tp)
    sharing = [len(placed.stages_of(rank)) for rank in placed.rank_of_stage]
    return [
        Terms(
            copies=counts[stage],
            capacity=line.allocatable_bytes(rank) / sharing[stage],
            versions=versions[rank],
            slowness=float(bodies[rank].seconds[-1] / body.seconds[-1]),
            link_s_per_byte=_link_seconds(devices[rank]) if offload else math.inf,
            boundary_s_per_byte=_boundary_seconds(line, stage),
            state_share=state_share,
        )
        for stage, rank in enumerate(placed.rank_of_stage)
    ]


def _link_seconds(device: Device) -> float:
    """Per byte to the host; infinite for a device that is one."""
    return math.inf if device.kind == "cpu" else 1 / device.host_link_bandwidth


def _boundary_seconds(line: Pipeline, stage: int) -> float:
    """Per byte that crosses the end of a stage; half of them go each way, at the same time."""
    if stage + 1 == len(line.stages):
        return 0.0
    return message_seconds(line, stage, stage + 1, _PROBE_BYTES) / _PROBE_BYTES / 2


def corrected(line: Pipeline, memories: Sequence[RankMemory], leaves: Leaves, shrink: float = 0.0) -> Leaves:
    """`leaves` whose capacities are smaller by what the ranges do not see of `line`: inputs, buffers, what is kept apart."""
    ends = [stage.start for stage in line.stages] + [leaves.ranges.size]
    terms = list(leaves.terms)
    for memory in memories:
        stages = line.program.placement.stages_of(memory.rank)
        seen = sum(leaves.demand(stage, ends[stage], ends[stage + 1]) for stage in stages)
        unseen = (memory.peak_bytes - seen) / len(stages)
        for stage in stages:
            capacity = terms[stage].capacity * (1 - shrink) - unseen
            terms[stage] = terms[stage].with_capacity(capacity)
    return Leaves(leaves.ranges, terms)


@lru_cache(maxsize=64)
def known_ranges(body: RangeCosts) -> Ranges:
    """The ranges of a body, worked out once."""
    return ranges_of(body)
