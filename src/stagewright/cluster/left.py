"""What is left of a cluster when devices are lost."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from stagewright.cluster.cluster import Cluster, NodeGroup


def without(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """`cluster` without some of its devices, by number; the others keep their order, and a node that has none left goes.

    Measured bandwidths stay those of the devices and nodes that are left; curves of collectives go, which were measured with
    all. A node keeps its network adapters.
    """
    kept = [device for device in range(cluster.num_devices) if device not in lost]
    nodes = [list(on_node) for _, on_node in groupby(kept, cluster.node_of)]
    shrunk = [
        cluster.group_of(on_node[0]).model_copy(update={"count": 1, "devices_per_node": len(on_node)})
        for on_node in nodes
    ]
    groups: list[NodeGroup] = []
    for group, run in groupby(shrunk):
        groups.append(group.model_copy(update={"count": len(list(run))}))
    measured = cluster.measured
    if measured is not None:
        chosen = kept if measured.between == "ranks" else [cluster.node_of(on_node[0]) for on_node in nodes]
        matrices = {
            name: matrix and tuple(tuple(matrix[row][column] for column in chosen) for row in chosen)
            for name, matrix in (("bandwidth", measured.bandwidth), ("latency_s", measured.latency_s))
        }
        measured = measured.model_copy(update=matrices)
    return Cluster(
        name=f"{len(kept)} devices of {cluster.name}", nodes=tuple(groups), measured=measured,
        collectives=() if lost else cluster.collectives, cores_of_others=cluster.cores_of_others,
    )  # fmt: skip
