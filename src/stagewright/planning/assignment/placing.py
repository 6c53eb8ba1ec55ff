"""The device of each rank of a plan, assigned by the measured links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm

import numpy as np

from stagewright.cluster import Cluster, arranged
from stagewright.cluster.variants import ArrangedCluster, order_of
from stagewright.graph.expert_parallel import expert_parallelism
from stagewright.graph.tensor_parallel import CONTEXT_GROUP, neighbour_strides
from stagewright.planning.assignment.problem import AssignmentProblem, Traffic, assignment_problem
from stagewright.planning.assignment.solve import assign
from stagewright.planning.prediction.predict import gradient_bytes, step_seconds
from stagewright.planning.prediction.staged_model import StagedModel

MOST_UNITS = 512
"""Maximum number of units to assign; larger clusters keep the order of their devices."""


def unit_width(staged: StagedModel) -> int:
    """Return the number of consecutive devices that stay together: tensor, context and expert parallel groups."""
    graph = staged.stages[0].graph
    strides, experts = neighbour_strides(graph), expert_parallelism(graph)
    context = strides[CONTEXT_GROUP] * graph.facts.get("cp", 1)
    return lcm(staged.tp, context, experts.spacing if experts else 1)


def placed(staged: StagedModel) -> tuple[StagedModel, tuple[int, ...]]:
    """Return `staged` in the device order that makes its step fastest, and the device of every rank.

    Where the links are not measured, or no faster order was found, `staged` is unchanged and there are no devices.
    """
    width = unit_width(staged)
    num_units = staged.pp * staged.ranks_per_stage // width
    if isinstance(staged.cluster, ArrangedCluster):
        return staged, ()  # the device order is fixed already
    if staged.cluster.measured is None or num_units < 2 or num_units > MOST_UNITS:
        return staged, ()
    if num_units * width != staged.cluster.num_devices:
        return staged, ()
    num_replicas = num_units // staged.pp
    order = devices_of(assign(line_assignment_problem(staged)).units, width, num_replicas, staged.pp)
    rearranged = replace(staged, cluster=arranged(staged.cluster, order))
    if step_seconds(rearranged) >= step_seconds(staged):
        return staged, ()
    return rearranged, order


def devices_of(units: Sequence[int], tp: int, num_replicas: int, num_stages: int) -> tuple[int, ...]:
    """Return the device of every rank (stage, replica, shard), for ``units[replica * num_stages + stage]``.

    >>> devices_of([0, 2, 1, 3], 1, 2, 2)
    (0, 1, 2, 3)
    >>> devices_of([1, 0], 2, 1, 2)
    (2, 3, 0, 1)
    """
    return tuple(
        units[replica * num_stages + stage] * tp + shard
        for stage in range(num_stages)
        for replica in range(num_replicas)
        for shard in range(tp)
    )


def line_assignment_problem(staged: StagedModel) -> AssignmentProblem:
    """Return the assignment problem of a split model, from its largest boundary, each pipeline rank's gradients, and those
    of tied parameters, which the first and the last of their ranks are taken to reduce."""
    width = unit_width(staged)
    sent = [size for summary in staged.summaries for size in summary.sent_bytes.values()]
    gradients = [gradient_bytes(staged.stages_of(rank)) for rank in range(staged.pp)]
    sizes = {value: size for of_rank in gradients for value, size in of_rank.items()}
    tied = {value: ranks for value, ranks in staged.holders.items() if len(ranks) > 1}
    microbatches = staged.program.num_microbatches
    stages_per_rank = staged.program.num_stages / staged.pp
    traffic = Traffic(
        boundary_bytes=float(max(sent, default=0)),
        gradient_bytes=np.array([float(sum(of_rank.values())) for of_rank in gradients]),
        num_exposed=stages_per_rank * max(1.0, microbatches / staged.pp),
        num_sharing=staged.num_holders,
        tied_bytes=sum(sizes[value] for value in tied),
        tied=(min(map(min, tied.values())), max(map(max, tied.values()))) if tied else (0, 0),
    )
    num_replicas = staged.ranks_per_stage // width
    return assignment_problem(
        staged.cluster, traffic, tp=width, num_replicas=num_replicas, num_stages=staged.pp
    )


def on_devices(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """Return `cluster` in the device order of a plan; unchanged where it does not have the plan's devices."""
    if not devices or max(devices) >= cluster.num_devices:
        return cluster
    unused = sorted(set(range(cluster.num_devices)) - set(devices))
    return arranged(cluster, (*devices, *unused))


@lru_cache(maxsize=8)
def device_places(cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Return the node of every rank, and its device within the node.

    >>> from stagewright.cluster import load_cluster
    >>> device_places(arranged(load_cluster("2x2x-a100-80"), [0, 2, 3, 1]))
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    devices = order_of(cluster)
    firsts: dict[int, int] = {}
    for rank, device in enumerate(devices):
        node = cluster.node_of(rank)
        firsts[node] = min(device, firsts.get(node, device))
    return tuple(
        (cluster.node_of(rank), devices[rank] - firsts[cluster.node_of(rank)]) for rank in range(len(devices))
    )
