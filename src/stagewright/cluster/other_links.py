"""A cluster whose links are faster, or some of them slower, than its description says."""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.cluster.cluster import Cluster, MeasuredBandwidth
from stagewright.cluster.link import Link


def with_faster_links(cluster: Cluster, factor: float) -> Cluster:
    """`cluster` with every bandwidth `factor` times as large; latencies stay. Curves of collectives go, which were measured
    on the links as they are."""
    nodes = tuple(
        group.model_copy(
            update={"intra_node": _faster(group.intra_node, factor), "inter_node": _faster(group.inter_node, factor)}
        )
        for group in cluster.nodes
    )  # fmt: skip
    measured = cluster.measured
    if measured is not None:
        rows = tuple(tuple(factor * one for one in row) for row in measured.bandwidth)
        measured = measured.model_copy(update={"bandwidth": rows})
    return Cluster(
        name=f"{cluster.name}, links {factor:g} times as fast", nodes=nodes, measured=measured,
        cores_of_others=cluster.cores_of_others,
    )  # fmt: skip


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


def _faster(link: Link, factor: float) -> Link:
    rates = {"bandwidth": factor * link.bandwidth}
    if link.ring_bandwidth is not None:
        rates["ring_bandwidth"] = factor * link.ring_bandwidth
    if link.collectives is not None:
        curve = link.collectives.model_copy(update={"bandwidth": factor * link.collectives.bandwidth})
        return link.model_copy(update={**rates, "collectives": curve})
    return link.model_copy(update=rates)
