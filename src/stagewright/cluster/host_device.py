"""Hosts as devices: the processors of nodes that take part in a pipeline themselves."""

from __future__ import annotations

from stagewright.cluster.cluster import Cluster, NodeGroup
from stagewright.cluster.device import Device, PerPrecision
from stagewright.cluster.host import Host
from stagewright.cluster.link import Link
from stagewright.errors import InputError

_MATMUL_HALF_FLOP = 1e8
_DISPATCH_S = 5e-6
_GUESS = "guess: eager PyTorch on a server processor"


def host_device(host: Host, num_devices: int, host_link_bandwidth: float) -> Device:
    """The processors of one node as one device of type ``cpu``: of all that the node has, the share of `num_devices`.

    Ignores: that they also issue the operators of the node's accelerators.
    """
    share = num_devices / host.num_devices
    peaks = {name: (host.peak_flops.get(name) or 0.0) * share for name in host.peak_flops.available()}
    guessed = (
        "matmul_half_flop", "attention_efficiency", "attention_backward_efficiency", "launch_overhead_s",
        "host_overhead_s", "context_bytes", "workspace_bytes",
    )  # fmt: skip
    copied = "memory_bytes", "memory_bandwidth", "memory_efficiency", "peak_flops", "matmul_efficiency"
    sources = {name: source for name in copied if (source := host.source_of(name))}
    return Device(
        name=f"host {host.name}",
        kind="cpu",
        memory_bytes=int(host.memory_bytes * share),
        memory_bandwidth=host.memory_bandwidth * share,
        memory_efficiency=host.memory_efficiency,
        peak_flops=PerPrecision(**peaks),
        matmul_efficiency=host.matmul_efficiency,
        matmul_half_flop=_MATMUL_HALF_FLOP,
        attention_efficiency=0.3,
        attention_backward_efficiency=0.2,
        launch_overhead_s=0.0,
        host_overhead_s=_DISPATCH_S,
        context_bytes=0,
        workspace_bytes=0,
        reserve_fraction=host.reserve_fraction,
        host_link_bandwidth=host_link_bandwidth,
        sources={
            **sources,
            **dict.fromkeys(guessed, _GUESS),
            "reserve_fraction": "guess: room for the system and for loading data",
            "host_link_bandwidth": "that of the node's devices",
        },
    )


def with_hosts(cluster: Cluster) -> Cluster:
    """`cluster` with one more device behind the others for the host of every node, or for as much of the host as belongs to
    the devices named, reached over the link of the node's devices to their host.

    Raises:
        InputError: a node whose host is not described, or links that were measured, which say nothing of hosts.
    """
    if cluster.measured is not None or cluster.collectives:
        raise InputError(
            f"cluster '{cluster.name}' has measured links, which say nothing of its hosts: leave out --host-stages"
        )
    return Cluster(name=f"{cluster.name}+hosts", nodes=(*cluster.nodes, *map(_host_nodes, cluster.nodes)))


def _host_nodes(group: NodeGroup) -> NodeGroup:
    if group.host is None:
        raise InputError(
            f"the nodes of '{group.device.name}' do not describe their processors: add a [nodes.host] table, or leave out "
            "--host-stages"
        )
    bandwidth = group.device.host_link_bandwidth
    link = Link(latency_s=1e-5, bandwidth=bandwidth, sources={
        "latency_s": "guess: a copy between a device and its host", "bandwidth": "that of the device to its host",
    })  # fmt: skip
    return NodeGroup(
        count=group.count,
        devices_per_node=1,
        num_nics=1,
        device=host_device(group.host, group.devices_per_node, bandwidth),
        intra_node=link,
        inter_node=link,
    )
