"""From a configuration to the device of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster import Cluster
from stagewright.estimation.megatron import MegatronStack, Shape
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.assignment import Assignment, Grid, as_numbered, assign, grid_of
from stagewright.planning.configure.fitting import Room
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.lineup import has_equal_nodes, kinds_of_ranks
from stagewright.planning.configure.search import Configuration
from stagewright.planning.job import Job

_MOST_WEIGHED = 512
"""Units up to which other orders are tried."""
_NEVER = 1e6
"""Seconds of a microbatch where it cannot be."""


def places(run: Run, unit_seconds: NDArray[np.float64] | None = None) -> Grid:
    """The places of a configuration: a replica's stages are a pipeline, a stage's replicas a ring.

    `unit_seconds` are those of a microbatch by unit and stage where units differ.
    """
    layout = run.layout
    counts = run.parameters_of_ranks()
    gradients = np.array([run.gradient_bytes(own, rest) for own, rest in counts])
    return grid_of(
        run.cluster,
        tp=layout.tp,
        num_replicas=layout.dp * layout.cp,
        num_stages=layout.pp,
        boundary_bytes=run.clock.boundary_bytes,
        gradient_bytes=gradients,
        num_exposed=layout.num_chunks * max(1.0, layout.num_microbatches / layout.pp),
        unit_seconds=unit_seconds,
        num_microbatches=1 if unit_seconds is None else layout.num_microbatches,
    )


def placed(shape: Shape, stack: MegatronStack, one: Configuration, job: Job, fusion_name: str) -> Assignment:
    """The units of devices, as the configuration's cluster numbers them, that take its places.

    On many nodes of which nothing was measured ranks stay as Megatron numbers them: among equal nodes every one is as good
    as any other. Nothing is weighed then, so the seconds are 0.
    """
    layout, cluster = one.layout, one.cluster
    num_replicas = layout.dp * layout.cp
    equal = has_equal_nodes(cluster)
    if (
        num_replicas * layout.pp > _MOST_WEIGHED
        and cluster.measured is None
        and not (equal and len(cluster.ranks_of(0)) % layout.tp)
    ):
        units = as_numbered(num_replicas, layout.pp)
        return Assignment(units, 0.0, 0.0, is_proved=False, num_tried=0)
    run = Run(shape, layout, stack, find_fusion(fusion_name), cluster)
    return assign(places(run, None if equal else _unit_seconds(run, Room(shape, stack).peaks(layout), job)))


def _unit_seconds(run: Run, peaks: Sequence[int], job: Job) -> NDArray[np.float64]:
    """Of one microbatch of every stage on every unit; where a stage has no room, more than any step takes."""
    layout, cluster = run.layout, run.cluster
    by_first: dict[int, NDArray[np.float64]] = {}
    (block,) = kinds_of_ranks(cluster, 1)
    for first in block:
        stages = run.clock_from(first).stages
        usable = job.usable_bytes(cluster.device_of(first), cluster)
        by_first[first] = np.array(
            [
                sum(one.forward.seconds + one.backward.seconds for one in stages[rank :: layout.pp])
                if peaks[rank] <= usable
                else _NEVER
                for rank in range(layout.pp)
            ]
        )
    num_units = layout.dp * layout.cp * layout.pp
    kinds = [first for (first,) in kinds_of_ranks(cluster, num_units)]
    return np.array([by_first[first] for first in kinds])


def rank_lines(found: Assignment, tp: int, num_stages: int, cluster: Cluster) -> list[str]:
    """One line per rank, in the order of ranks (stage, replica, shard): node and device in the node."""
    num_replicas = len(found.units) // num_stages
    lines = []
    for stage in range(num_stages):
        for replica in range(num_replicas):
            unit = found.units[replica * num_stages + stage]
            for shard in range(tp):
                device = unit * tp + shard
                node = cluster.node_of(device)
                lines.append(f"{len(lines)},{node},{cluster.ranks_of(node).index(device)}")
    return lines
