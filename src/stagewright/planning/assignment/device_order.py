"""The device order of pipeline ranks on a cluster with several kinds of devices."""

from __future__ import annotations

from functools import lru_cache

from stagewright.cluster import Cluster, Device, arranged
from stagewright.planning.job import Job


def orders(cluster: Cluster, dtype: str) -> tuple[Cluster, ...]:
    """Return the cluster in the device orders to try: fast devices first, and last; only one where nodes are equal.

    Raises:
        InputError: a device does not support `dtype`.
    """
    rate = {group.device: group.device.matmul_flops(dtype) for group in cluster.nodes}
    if len(cluster.nodes) == 1:
        return (cluster,)
    ranks = range(cluster.num_devices)
    device_orders = [
        tuple(sorted(ranks, key=lambda rank: (sign * rate[cluster.device_of(rank)], rank)))
        for sign in (-1, 1)
    ]
    return tuple(arranged(cluster, order) for order in dict.fromkeys(device_orders))


@lru_cache(maxsize=512)
def devices_of_ranks(cluster: Cluster, pp: int) -> tuple[tuple[Device, ...], ...]:
    """Return, for each of `pp` pipeline ranks that divide the devices evenly, its devices, equal ones once.

    >>> from stagewright.cluster import load_cluster
    >>> mixed = load_cluster("4x-v100-32+4x-t4")
    >>> [[device.name for device in devices] for devices in devices_of_ranks(mixed, 1)], len(devices_of_ranks(mixed, 2))
    ([['v100-32', 't4']], 2)
    """
    width = cluster.num_devices // pp
    return tuple(cluster.kinds_of(range(rank * width, (rank + 1) * width)) for rank in range(pp))


def usable_bytes_of_ranks(job: Job, cluster: Cluster, pp: int) -> list[int]:
    """Return the bytes that the allocator of each of `pp` ranks may reserve; the minimum over several kinds of devices."""
    return [
        min(job.usable_bytes(device, cluster) for device in devices)
        for devices in devices_of_ranks(cluster, pp)
    ]
