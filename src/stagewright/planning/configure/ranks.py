"""From a configuration to the device of every rank."""

from __future__ import annotations

import numpy as np

from stagewright.cluster import Cluster
from stagewright.estimation.megatron import MegatronStack, Shape
from stagewright.planning.configure.assignment import Assignment, Grid, as_numbered, assign, grid_of
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.search import Configuration

_MOST_WEIGHED = 512
"""Units of equal nodes up to which other orders are tried."""


def places(run: Run, cluster: Cluster) -> Grid:
    """The places of a configuration: a replica's stages are a pipeline, a stage's replicas a ring."""
    layout = run.layout
    counts = run.parameters_of_ranks()
    gradients = np.array([run.gradient_bytes(own, rest) for own, rest in counts])
    return grid_of(
        cluster,
        tp=layout.tp,
        num_replicas=layout.dp * layout.cp,
        num_stages=layout.pp,
        boundary_bytes=run.clock.boundary_bytes,
        gradient_bytes=gradients,
        num_exposed=layout.num_chunks * max(1.0, layout.num_microbatches / layout.pp),
    )


def placed(
    shape: Shape, stack: MegatronStack, one: Configuration, cluster: Cluster, fusion_name: str
) -> Assignment:
    """The units of devices that take the places of a configuration.

    On many equal nodes of which nothing was measured ranks stay as Megatron numbers them: every node is as good as any
    other. Nothing is weighed then, so the seconds are 0.
    """
    from stagewright.estimation.megatron.fusion import find_fusion

    layout = one.layout
    num_replicas = layout.dp * layout.cp
    if (
        num_replicas * layout.pp > _MOST_WEIGHED
        and cluster.measured is None
        and len(cluster.nodes) == 1
        and len(cluster.ranks_of(0)) % layout.tp == 0
    ):
        units = as_numbered(num_replicas, layout.pp)
        return Assignment(units, 0.0, 0.0, is_proved=False, num_tried=0)
    return assign(places(Run(shape, one.layout, stack, find_fusion(fusion_name), cluster), cluster))


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
                lines.append(f"{len(lines)},{node},{device - cluster.ranks_of(node)[0]}")
    return lines
