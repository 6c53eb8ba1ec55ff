"""A cluster whose devices compute as fast as a run showed, in place of as fast as their figures say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from statistics import median

from stagewright.cluster.cluster import Cluster, NodeGroup

_ALIKE = 1.1
"""Devices whose paces differ by less count as equally fast: a run's own noise."""


def paced(cluster: Cluster, paces: Mapping[int, float]) -> Cluster:
    """`cluster` with the pace (`Device.pace`) of some of its devices, by number; the others have the middle one.

    Devices of nearly the same pace get the same. A node is as fast as its slowest device; where the cluster is one node, its
    devices become nodes of their own, joined by the same links. Ignores: the links' own pace.
    """
    middle = median(paces.values())
    of_device = _alike([paces.get(number, middle) for number in range(cluster.num_devices)])
    if cluster.num_nodes == 1:
        return _divided(cluster, of_device)
    of_node = [max(of_device[rank] for rank in cluster.ranks_of(node)) for node in range(cluster.num_nodes)]
    kinds = [(cluster.group_of(cluster.ranks_of(node)[0]), pace) for node, pace in enumerate(of_node)]
    groups = [_group(group, pace, count=len(list(run))) for (group, pace), run in groupby(kinds)]
    return cluster.model_copy(update={"nodes": tuple(groups)})


def _divided(cluster: Cluster, of_device: list[float]) -> Cluster:
    (node,) = cluster.nodes
    if len(set(of_device)) == 1:
        return cluster.model_copy(update={"nodes": (_group(node, of_device[0], count=1),)})
    groups = []
    for pace, run in groupby(of_device):
        size = len(list(run))
        part = {"devices_per_node": size, "num_nics": size, "inter_node": node.intra_node}
        groups.append(_group(node, pace, count=1).model_copy(update=part))
    return cluster.model_copy(update={"nodes": tuple(groups)})


def _group(node: NodeGroup, pace: float, count: int) -> NodeGroup:
    return node.model_copy(update={"count": count, "device": node.device.model_copy(update={"pace": pace})})


def _alike(paces: list[float]) -> list[float]:
    """
    >>> _alike([1.0, 1.5, 1.04, 1.52])
    [1.02, 1.51, 1.02, 1.51]
    """
    classes: list[list[int]] = []
    for number in sorted(range(len(paces)), key=paces.__getitem__):
        if classes and paces[number] < _ALIKE * paces[classes[-1][0]]:
            classes[-1].append(number)
        else:
            classes.append([number])
    found = list(paces)
    for members in classes:
        middle = round(median(paces[number] for number in members), 4)
        for number in members:
            found[number] = middle
    return found
