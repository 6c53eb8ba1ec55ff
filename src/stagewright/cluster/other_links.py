"""A cluster some of whose links are slower than its description says."""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.cluster.cluster import Cluster, MeasuredBandwidth


def with_slower_links(cluster: Cluster, factors: Mapping[tuple[int, int], float]) -> Cluster:
    """`cluster`, in which a message between some devices, given by number, takes so many times as long, both ways.

    Ignores: that links of the same adapters slow down together, unless each is given; curves of collectives, which go.
    """
    if not factors:
        return cluster
    both = {**factors, **{(b, a): factor for (a, b), factor in factors.items()}}
    devices = range(cluster.num_devices)
    links = [[cluster.link_between(a, b) for b in devices] for a in devices]
    measured = MeasuredBandwidth(
        between="ranks",
        bandwidth=tuple(
            tuple(links[a][b].bandwidth / both.get((a, b), 1.0) for b in devices) for a in devices
        ),
        latency_s=tuple(
            tuple(links[a][b].latency_s * both.get((a, b), 1.0) for b in devices) for a in devices
        ),
    )
    return cluster.model_copy(update={"measured": measured, "collectives": ()})
