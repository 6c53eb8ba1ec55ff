"""Measurement of a cluster from all of its ranks, started one per device by a launcher such as torchrun."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from statistics import median_high

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from stagewright.cluster import Cluster, Link, MeasuredBandwidth, MeasuredCollective, NodeGroup
from stagewright.errors import InputError
from stagewright.execution.accelerator import num_devices
from stagewright.execution.collectives import ProcessGroups, backend_of, exchange
from stagewright.execution.device import local_device
from stagewright.execution.links import LinkCurve, Progress, measure_collectives, measure_links
from stagewright.execution.probe_description import describe, source_text
from stagewright.execution.probe_measurements import Measurements, Stopwatch, measure_compute, measure_posting

_SAME_SPEED = 1.25
"""Ratio of rates below which devices are of one kind and their figures are pooled."""


@dataclass(frozen=True)
class _RankFigures:
    """The measurements of one rank."""

    device_type: str
    source: str
    threads: int
    measurements: Measurements | None
    links: list[LinkCurve]
    whole: dict[str, list[tuple[float, float]]]
    inside: dict[str, list[tuple[float, float]]]


@contextmanager
def joined(device: str, time_limit_s: float) -> Iterator[torch.device]:
    """Join the process group that a launcher has described, for the duration of the context; yields this rank's device.
    Raises `InputError` where there is no launcher or no such device."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "probe --cluster runs under a launcher: start it on every host, e.g. with "
            "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST -m stagewright.cli probe --cluster"
        )
    if device not in ("cpu", "cuda") or (device == "cuda" and not num_devices("cuda")):
        raise InputError(
            f"cannot probe device '{device}': choose cpu"
            + (", or cuda where there is one" * (device != "cpu"))
        )
    target = local_device(device)
    dist.init_process_group(backend_of(device), timeout=timedelta(seconds=time_limit_s))
    try:
        yield target
        dist.barrier()
    finally:
        dist.destroy_process_group()


def probe_cluster(
    device: torch.device,
    base: Cluster | None = None,
    seconds_per_figure: float = 0.1,
    progress: Progress = lambda what, fraction: None,
) -> Cluster | None:
    """Return the cluster of all ranks of the process group, one per device; None on all ranks but the first.

    Ranks of one host (torchrun's GROUP_RANK, else the host's name) are a node. All devices are measured at the same
    time, then the links of all pairs of ranks in rounds that use no host twice, then collectives of all ranks and of
    the ranks of a host.

    Args:
        base: the devices and nodes, if they are described already; only links are measured then.
        seconds_per_figure: seconds for each figure of a device and for each collective and size; links take half.
        progress: called on every rank with what is being measured and the fraction done.

    Raises:
        InputError: the ranks of a host are not consecutive, or `base` has other nodes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        raise InputError("a single rank has no links: start probe --cluster on two devices or more")
    nodes = _nodes(exchange(_host()))
    if base is not None:
        _check_base(base, nodes)
    measurements = None
    if base is None:
        watch, measurements = Stopwatch(device, seconds_per_figure, dist.barrier), Measurements()
        measure_compute(watch, measurements, lambda what, done: progress(what, done / 2))
        measure_posting(watch, measurements)
    links = measure_links(nodes, device, seconds_per_figure / 2, progress)
    progress("collectives", 0.9)
    neighbours = next(ranks for ranks in nodes if rank in ranks)
    host = ProcessGroups().new(nodes)
    whole = measure_collectives(None, device, seconds_per_figure)
    inside = {} if len(neighbours) == 1 else measure_collectives(host, device, seconds_per_figure)
    source = source_text(device.type, world, torch.get_num_threads())
    figures = _RankFigures(device.type, source, torch.get_num_threads(), measurements, links, whole, inside)
    adapter = TypeAdapter(_RankFigures)
    everything = exchange(adapter.dump_python(figures, mode="json"))
    return _described([*map(adapter.validate_python, everything)], nodes, base) if rank == 0 else None


def _host() -> int:
    """Return a number that identifies this rank's host: the launcher's, as names may repeat in containers."""
    group = os.environ.get("GROUP_RANK")
    return int(group) if group else zlib.crc32(socket.gethostname().encode())


def _nodes(hosts: Sequence[int]) -> list[list[int]]:
    """
    >>> _nodes([7, 7, 8])
    [[0, 1], [2]]
    """
    nodes = [list(ranks) for _, ranks in groupby(range(len(hosts)), key=lambda rank: hosts[rank])]
    if len(nodes) != len(set(hosts)):
        raise InputError(
            f"the ranks of a host are not consecutive (hosts {', '.join(map(str, hosts))}): number ranks host by host"
        )
    return nodes


def _check_base(base: Cluster, nodes: list[list[int]]) -> None:
    wanted = [len(base.ranks_of(node)) for node in range(base.num_nodes)]
    started = [len(ranks) for ranks in nodes]
    if wanted != started:
        raise InputError(
            f"cluster '{base.name}' has nodes of {wanted} devices, but hosts with {started} ranks were started: start "
            "one rank per device, or name another cluster"
        )


# -- from the ranks' figures to a description -------------------------------------------------------------------------


def _described(by_rank: list[_RankFigures], nodes: list[list[int]], base: Cluster | None) -> Cluster:
    source = by_rank[0].source
    links = {(link.sender, link.receiver): link for figures in by_rank for link in figures.links}

    def matrix(name: str) -> tuple[tuple[float, ...], ...]:
        ranks = range(len(by_rank))
        return tuple(tuple(getattr(links.get((a, b)), name, 0.0) for b in ranks) for a in ranks)

    measured = MeasuredBandwidth(
        between="ranks",
        bandwidth=matrix("bandwidth"),
        latency_s=matrix("latency_s"),
        sources={"bandwidth": source, "latency_s": source},
    )
    return Cluster(
        name=base.name if base is not None else "probed",
        nodes=base.nodes if base is not None else _node_groups(by_rank, nodes),
        measured=measured,
        collectives=_collectives(by_rank, nodes, source),
    )


def _collectives(
    by_rank: list[_RankFigures], nodes: list[list[int]], source: str
) -> tuple[MeasuredCollective, ...]:
    """Return the collectives of all ranks, and those of the slowest node where all nodes have equally many ranks."""
    curves = [("cluster", len(by_rank), name, points) for name, points in by_rank[0].whole.items()]
    if len({len(ranks) for ranks in nodes}) == 1 and len(nodes[0]) > 1 and len(nodes) > 1:
        for name in by_rank[0].inside:
            of_nodes = [by_rank[ranks[0]].inside[name] for ranks in nodes]
            count = min(map(len, of_nodes))
            slowest = max((points[:count] for points in of_nodes), key=lambda points: points[-1][1])
            curves.append(("node", len(nodes[0]), name, slowest))
    elif len(nodes) == 1:
        curves = [("node", size, name, points) for _, size, name, points in curves]
    return tuple(
        MeasuredCollective.model_validate(
            {
                "operation": name, "spans": spans, "num_ranks": size,
                "num_bytes": [num_bytes for num_bytes, _ in points], "seconds": [seconds for _, seconds in points],
                "sources": {"seconds": source, "num_bytes": source},
            }
        )
        for spans, size, name, points in curves
    )  # fmt: skip


def _node_groups(by_rank: list[_RankFigures], nodes: list[list[int]]) -> tuple[NodeGroup, ...]:
    """Return groups of consecutive nodes that have equally many devices of one kind."""
    kinds = _kinds(by_rank, nodes)
    by_kind = {
        kind: _device_of(by_rank, [nodes[node] for node, other in enumerate(kinds) if other == kind])
        for kind in set(kinds)
    }
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    links = [link for figures in by_rank for link in figures.links]
    across = [link for link in links if node_of[link.sender] != node_of[link.receiver]]
    groups = []
    for kind, run in groupby(range(len(nodes)), key=lambda node: kinds[node]):
        members, group = list(run), by_kind[kind]
        name = "local" if len(by_kind) == 1 else f"local-{kind}"
        nics = "guess: only the measured links matter"
        groups.append(
            NodeGroup(
                count=len(members),
                devices_per_node=len(nodes[members[0]]),
                num_nics=1,
                device=group.device.model_copy(update={"name": name}),
                intra_node=group.intra_node,
                inter_node=_middle(across or links, by_rank[0].source),
                sources={"devices_per_node": by_rank[0].source, "num_nics": nics},
            )
        )
    return tuple(groups)


def _kinds(by_rank: list[_RankFigures], nodes: list[list[int]]) -> list[int]:
    """Return the kind of each node's devices, numbered in the order of first appearance."""
    first: list[tuple[float, int]] = []
    kinds = []
    for ranks in nodes:
        rate = _rate([by_rank[rank] for rank in ranks])
        for kind, (known_rate, size) in enumerate(first):
            if size == len(ranks) and max(rate / known_rate, known_rate / rate) < _SAME_SPEED:
                kinds.append(kind)
                break
        else:
            kinds.append(len(first))
            first.append((rate, len(ranks)))
    return kinds


def _rate(members: list[_RankFigures]) -> float:
    """Return the median rank's FLOP/s in the largest matmul."""
    measured = (figures.measurements for figures in members if figures.measurements is not None)
    return median_high(flop / seconds for flop, seconds in (m.matmul_seconds["fp32"][-1] for m in measured))


def _device_of(by_rank: list[_RankFigures], nodes: list[list[int]]) -> NodeGroup:
    """Describe a node of one kind: the pooled figures of all such nodes, and the median link inside them."""
    members = [by_rank[rank] for ranks in nodes for rank in ranks]
    pooled = [figures.measurements for figures in members if figures.measurements is not None]
    size = len(nodes[0])
    group = describe(pooled, members[0].device_type, members[0].threads, size).nodes[0]
    inside = [
        link for ranks in nodes for rank in ranks for link in by_rank[rank].links if link.receiver in ranks
    ]
    link = _middle(inside, members[0].source) if inside else group.intra_node
    return group.model_copy(update={"intra_node": link, "devices_per_node": size})


def _middle(links: list[LinkCurve], source: str) -> Link:
    names = ("latency_s", "bandwidth")
    figures = {name: median_high(getattr(link, name) for link in links) for name in names}
    return Link(**figures, sources=dict.fromkeys(figures, source))
