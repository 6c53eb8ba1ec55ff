"""Which devices the ranks of a configuration take: places weighed by links, and the cluster as ranks then see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster import Cluster
from stagewright.cluster.arranged import arranged, order_of
from stagewright.estimation.megatron import Layout
from stagewright.planning.configure.assignment import Assignment, Grid, as_numbered, assign, grid_of
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.lineup import has_equal_nodes, kinds_of_ranks
from stagewright.planning.job import Job

_MOST_WEIGHED = 512
"""Units up to which other orders are tried."""
_NEVER = 1e6
"""Seconds of a microbatch where it cannot be."""


def unit_width(layout: Layout) -> int:
    """Devices that stay together: groups of tensor, context and expert parallelism are as numbered.

    >>> unit_width(Layout(128, tp=2, cp=2, ep=4, dp=4))
    8
    """
    return layout.tp * lcm(layout.cp, layout.ep)


def places(run: Run, unit_seconds: NDArray[np.float64] | None = None) -> Grid:
    """The places of a configuration: a replica's stages are a pipeline, a stage's replicas a ring.

    `unit_seconds` are those of a microbatch by unit and stage where units differ.
    """
    layout, width = run.layout, unit_width(run.layout)
    counts = run.parameters_of_ranks()
    gradients = np.array([run.gradient_bytes(own, rest) for own, rest in counts])
    return grid_of(
        run.cluster,
        tp=width,
        num_replicas=layout.tp * layout.dp * layout.cp // width,
        num_stages=layout.pp,
        boundary_bytes=run.clock.boundary_bytes,
        gradient_bytes=gradients,
        num_exposed=layout.num_chunks * max(1.0, layout.num_microbatches / layout.pp),
        unit_seconds=unit_seconds,
        num_microbatches=1 if unit_seconds is None else layout.num_microbatches,
        num_sharing=layout.dp * layout.cp,
        tied_bytes=run.embedding_bytes,
        tied=(0, layout.pp - 1),
    )


def weighed(run: Run, job: Job, peaks: Sequence[int], num_steps: int | None = None) -> Assignment:
    """The units of devices, as the run's cluster numbers them, that take its places; `peaks` bytes of the pipeline ranks.

    On many nodes of which nothing was measured ranks stay as Megatron numbers them: among equal nodes every one is as good
    as any other. So they do where a unit would mix kinds of devices. Nothing is weighed then, so the seconds are 0.
    """
    layout, cluster, width = run.layout, run.cluster, unit_width(run.layout)
    num_units, equal = cluster.num_devices // width, has_equal_nodes(cluster)
    many = num_units > _MOST_WEIGHED and cluster.measured is None
    if many and not (equal and len(cluster.ranks_of(0)) % layout.tp):
        return _as_numbered(num_units, layout.pp)
    if equal:
        return _assigned(places(run), num_steps)
    if any(len(kinds) > 1 for kinds in kinds_of_ranks(cluster, num_units)):
        return _as_numbered(num_units, layout.pp)
    return _assigned(places(run, _unit_seconds(run, peaks, job)), num_steps)


def _assigned(grid: Grid, num_steps: int | None) -> Assignment:
    return (
        assign(grid)
        if num_steps is None
        else assign(grid, num_steps=num_steps, num_starts=2, num_exchanges=0)
    )


def _as_numbered(num_units: int, num_stages: int) -> Assignment:
    units = as_numbered(num_units // num_stages, num_stages)
    return Assignment(units, 0.0, 0.0, is_proved=False, num_tried=0)


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
    kinds = [first for (first,) in kinds_of_ranks(cluster, cluster.num_devices // unit_width(layout))]
    return np.array([by_first[first] for first in kinds])


def rearranged(cluster: Cluster, layout: Layout, units: Sequence[int]) -> Cluster:
    """`cluster` as ranks see it when ``units[replica * pp + stage]`` of its units take the places."""
    width, pp = unit_width(layout), layout.pp
    own = order_of(cluster)
    order = [
        own[units[replica * pp + stage] * width + device]
        for stage in range(pp)
        for replica in range(len(units) // pp)
        for device in range(width)
    ]
    return arranged(cluster, order)


@lru_cache(maxsize=8)
def device_places(cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Of every rank its node, and its device in the node.

    >>> from stagewright.cluster import load_cluster
    >>> device_places(arranged(load_cluster("2x2x-a100-80"), [0, 2, 3, 1]))
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    own = order_of(cluster)
    firsts: dict[int, int] = {}
    for rank, device in enumerate(own):
        node = cluster.node_of(rank)
        firsts[node] = min(device, firsts.get(node, device))
    return tuple(
        (cluster.node_of(rank), own[rank] - firsts[cluster.node_of(rank)]) for rank in range(len(own))
    )
