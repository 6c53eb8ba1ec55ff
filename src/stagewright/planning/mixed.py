"""Plans for clusters of several kinds of devices: stages as long as their devices are fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stagewright.cluster import Cluster, Device, arranged
from stagewright.errors import InputError, PlanError
from stagewright.estimation.memory import StageMemory
from stagewright.estimation.stages import BodyCosts, summarise
from stagewright.graph import OperatorGraph
from stagewright.graph.stage import carve
from stagewright.planning.candidate import Candidate, Choice, make_plan, make_program, policies
from stagewright.planning.job import Job
from stagewright.planning.partition import Floats, Ints
from stagewright.planning.plan import ClusterSection, Plan
from stagewright.planning.predict import Pipeline, costing, rank_memories, reserved_bytes
from stagewright.planning.widths import microbatch_sizes, widths_of
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference

Report = Callable[[str], None]

ONE_STAGE_EACH = ("1f1b", "gpipe")
"""Schedules that are tried."""


def plan_mixed(
    reference: ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    schedules: Sequence[str] = ("1f1b",),
    pp: int | None = None,
    dp: int | None = None,
    microbatch: int | None = None,
    report: Report = lambda stage: None,
    trace: Callable[..., OperatorGraph] = cached_trace,
) -> list[Plan]:
    """Plans of `reference` on a cluster of several kinds of devices, fastest first: one stage per pipeline rank, cut so
    that the slowest rank is as fast as can be by the costs on its own devices.

    Devices of a kind are next to each other in the pipeline, the fast ones first or last. Ignores: recomputation,
    offloading, layers shared by ranks, and that larger devices could keep more: every rank must fit the least memory.

    Raises:
        InputError: widths or a device that cannot be used.
        PlanError: nothing fits.
    """
    found: list[Plan] = []
    widths = widths_of(cluster, job, pp, dp)
    missing: list[int] = []
    for size in microbatch_sizes(widths, job, microbatch):
        report(f"tracing microbatches of {size}")
        graph = trace(reference, size, report=report, **job.traced(cluster.nodes[0].device.kind))
        bodies = _bodies(graph, cluster, job)
        for num_replicas, num_stages in widths:
            count, rest = divmod(job.global_batch // num_replicas, size)
            for schedule in () if rest else schedules:
                choice = Choice(num_replicas, num_stages, size, count, schedule, False)
                report(str(choice))
                for order in _orders(cluster, bodies):
                    made = _planned(reference, cluster, job, choice, bodies, order)
                    if isinstance(made, Plan):
                        found.append(made)
                    else:
                        missing.append(made)
    if not found:
        least = (
            f"lacks {min(missing)} bytes on its fullest device"
            if missing
            else "has a whole share of the batch"
        )
        raise PlanError(f"no configuration of mixed cluster '{cluster.name}' fits: the best {least}")
    return sorted(found, key=lambda one: one.predictions.step_seconds)


def _bodies(graph: OperatorGraph, cluster: Cluster, job: Job) -> dict[Device, BodyCosts]:
    """The costs of the model on each kind of device."""
    kinds = dict.fromkeys(group.device for group in cluster.nodes)
    return {kind: BodyCosts(graph, costing(graph, _all_of(cluster, kind), job)) for kind in kinds}


def _all_of(cluster: Cluster, device: Device) -> Cluster:
    """`cluster` with its own links, as if every device were `device`."""
    nodes = tuple(group.model_copy(update={"device": device}) for group in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _orders(cluster: Cluster, bodies: dict[Device, BodyCosts]) -> list[tuple[int, ...]]:
    """Devices by rank: the fastest kind first, and last."""
    speed = {kind: float(body.seconds[-1]) for kind, body in bodies.items()}
    ranks = range(cluster.num_devices)
    fast_first = sorted(ranks, key=lambda rank: (speed[cluster.device_of(rank)], rank))
    slow_first = sorted(ranks, key=lambda rank: (-speed[cluster.device_of(rank)], rank))
    return list(dict.fromkeys((tuple(fast_first), tuple(slow_first))))


def _planned(
    reference: ModelReference,
    cluster: Cluster,
    job: Job,
    choice: Choice,
    bodies: dict[Device, BodyCosts],
    order: tuple[int, ...],
) -> Plan | int:
    """The plan of a choice on devices in `order`, or the bytes that its fullest rank lacks."""
    kinds = [_slowest(cluster, order, rank, choice.dp, bodies) for rank in range(choice.pp)]
    cuts = balanced_cuts([bodies[kind] for kind in kinds])
    program = make_program(choice)
    alike = arranged(_all_of(cluster, _weakest(cluster, bodies)), order)
    memories = tuple(StageMemory(stage) for stage in carve(bodies[kinds[0]].graph, cuts, policies(program)))
    summaries = tuple(
        summarise(memory, bodies[kind].costing) for memory, kind in zip(memories, kinds, strict=True)
    )
    line = Pipeline(memories, summaries, program, alike, job, choice.dp)
    replayed = tuple(rank_memories(line))
    missing = max(reserved_bytes(memory, alike) for memory in replayed) - job.usable_bytes(alike.device)
    if missing > 0:
        return missing
    one = Candidate(choice, line, tuple(cuts), replayed, missing, ("keep",) * choice.pp)
    made = make_plan(one, bodies[alike.device], reference)
    peaks = [
        cluster.device_of(rank).peak_flops.get(job.computed_in) or 0.0 for rank in range(cluster.num_devices)
    ]
    alike_peak = (alike.device.peak_flops.get(job.computed_in) or 0.0) * len(peaks)
    mfu = made.predictions.mfu * alike_peak / sum(peaks)
    return made.model_copy(
        update={
            "cluster": ClusterSection.of(cluster),
            "devices": order,
            "predictions": made.predictions.model_copy(update={"mfu": mfu}),
        }
    )


def _slowest(
    cluster: Cluster, order: tuple[int, ...], rank: int, num_replicas: int, bodies: dict[Device, BodyCosts]
) -> Device:
    """The kind that the replicas of a pipeline rank wait for."""
    kinds = {cluster.device_of(device) for device in order[rank * num_replicas : (rank + 1) * num_replicas]}
    return max(kinds, key=lambda kind: float(bodies[kind].seconds[-1]))


def _weakest(cluster: Cluster, bodies: dict[Device, BodyCosts]) -> Device:
    """The slowest kind, with the memory of the smallest."""
    slowest = max(bodies, key=lambda kind: float(bodies[kind].seconds[-1]))
    smallest = min(bodies, key=lambda kind: kind.usable_bytes)
    if smallest.usable_bytes < slowest.usable_bytes:
        raise InputError(
            f"cluster '{cluster.name}': '{slowest.name}' is slower than '{smallest.name}' but has more memory: give both "
            "the lesser memory, e.g. with --memory-limit and memory_bytes in the cluster file"
        )
    return slowest


def balanced_cuts(bodies: Sequence[BodyCosts]) -> list[int]:
    """Cuts of one stage for each of `bodies`, the same model on each stage's device, whose slowest stage is as fast as
    can be.

    Raises:
        PlanError: too few legal cuts.
    """
    graph, legal = bodies[0].graph, bodies[0].legal_cuts
    if len(bodies) - 1 > len(legal):
        raise PlanError(f"model '{graph.name}' can be cut at {len(legal)} places only: use fewer stages")
    ends = np.concatenate([[0], legal, [bodies[0].size]]).astype(np.int64)
    times = [body.seconds[ends] for body in bodies]
    low, high = 0.0, max(float(time[-1]) for time in times)
    best = _reach(ends, times, high)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        reached = _reach(ends, times, middle)
        low, high, best = (low, middle, reached) if reached else (middle, high, best)
    assert best is not None
    return best


def _reach(ends: Ints, times: Sequence[Floats], bottleneck: float) -> list[int] | None:
    """Cuts of stages that each go as far as they may within `bottleneck` seconds; None if that is not far enough."""
    at, cuts, last = 0, [], len(ends) - 1
    for stage, time in enumerate(times):
        farthest = int(np.searchsorted(time, time[at] + bottleneck * (1 + 1e-12), side="right")) - 1
        end = min(farthest, last - (len(times) - 1 - stage))
        if end <= at:
            return None
        at = end
        cuts.append(int(ends[end]))
    return cuts[:-1] if at == last else None
