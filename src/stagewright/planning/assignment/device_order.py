"""The device order of pipeline ranks on a cluster with several kinds of devices."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from stagewright.cluster import Cluster, Device, arranged
from stagewright.planning.job import Job


def has_equal_nodes(cluster: Cluster) -> bool:
    """Return whether all nodes are equal."""
    return len(cluster.nodes) == 1


def orders(cluster: Cluster, dtype: str) -> tuple[Cluster, ...]:
    """Return the cluster in the device orders to try: fast devices first, and last; only one where nodes are equal.

    Raises:
        InputError: a device does not support `dtype`.
    """
    rate = {group.device: group.device.matmul_flops(dtype) for group in cluster.nodes}
    if has_equal_nodes(cluster):
        return (cluster,)
    ranks = range(cluster.num_devices)
    device_orders = [
        tuple(sorted(ranks, key=lambda rank: (sign * rate[cluster.device_of(rank)], rank)))
        for sign in (-1, 1)
    ]
    return tuple(arranged(cluster, order) for order in dict.fromkeys(device_orders))


@lru_cache(maxsize=512)
def kinds_of_ranks(cluster: Cluster, pp: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each of `pp` equal blocks of devices, one device of every kind of node in it: the first in the cluster.

    >>> from stagewright.cluster import load_cluster
    >>> kinds_of_ranks(load_cluster("4x-v100-32+4x-t4"), 2), kinds_of_ranks(load_cluster("4x-v100-32+4x-t4"), 1)
    (((0,), (4,)), ((0, 4),))
    """
    firsts: dict[int, int] = {}
    width = cluster.num_devices // pp
    blocks: list[dict[int, None]] = [{} for _ in range(pp)]
    for rank in range(cluster.num_devices):
        first = firsts.setdefault(id(cluster.group_of(rank)), rank)
        blocks[rank // width][first] = None
    return tuple(tuple(block) for block in blocks)


@lru_cache(maxsize=512)
def devices_of_ranks(cluster: Cluster, pp: int) -> tuple[tuple[Device, ...], ...]:
    """Return the devices of `kinds_of_ranks`."""
    return tuple(tuple(cluster.device_of(first) for first in block) for block in kinds_of_ranks(cluster, pp))


def usable_bytes_of_ranks(job: Job, cluster: Cluster, pp: int) -> list[int]:
    """Return the bytes that the allocator of each of `pp` ranks may reserve; the minimum over several kinds of devices."""
    return [
        min(job.usable_bytes(device, cluster) for device in devices)
        for devices in devices_of_ranks(cluster, pp)
    ]


def widest_unit(cluster: Cluster) -> int:
    """Return the largest number of devices that divides the devices of every node.

    >>> from stagewright.cluster import load_cluster
    >>> widest_unit(load_cluster("8x-h100+4x-t4"))
    4
    """
    return gcd(*(group.devices_per_node for group in cluster.nodes))
