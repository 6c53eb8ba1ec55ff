"""Measures a cluster from all of its ranks, as a launcher such as torchrun has started them, one per device."""

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
"""Devices whose rates differ by less are of one kind, and their figures are pooled."""


@dataclass(frozen=True)
class _RankFigures:
    """What one rank has to say."""

    device_type: str
    source: str
    threads: int
    measurements: Measurements | None
    links: list[LinkCurve]
    whole: dict[str, list[tuple[float, float]]]
    inside: dict[str, list[tuple[float, float]]]


@contextmanager
def joined(device: str, time_limit_s: float) -> Iterator[torch.device]:
    """Inside, this process is a rank of the group that a launcher has described; gives its device. Raises `InputError`
    where there is no launcher or no such device."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise InputError(
            "probe --cluster is a rank of a launcher: start it on every host, e.g. with "
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
    """The cluster of all ranks of the process group, each a device; None on all ranks but the first.

    Ranks of one host (torchrun's GROUP_RANK, else the host's name) are a node. All devices are measured at the same
    time, then the links of all pairs of ranks in rounds that meet no host twice, then collectives of all ranks and of
    those of a host.

    Args:
        base: the devices and nodes, if they are known already; links are measured only.
        seconds_per_figure: time for each figure of a device and for each collective and size; links take half.
        progress: told what is measured, and the fraction done, on every rank.

    Raises:
        InputError: the ranks of a host are not neighbours, or `base` has other nodes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        raise InputError("one rank has no links: start probe --cluster on two devices or more")
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
    own = next(ranks for ranks in nodes if rank in ranks)
    host = ProcessGroups().new(nodes)
    whole = measure_collectives(None, device, seconds_per_figure)
    inside = {} if len(own) == 1 else measure_collectives(host, device, seconds_per_figure)
    source = source_text(device.type, world, torch.get_num_threads())
    found = _RankFigures(device.type, source, torch.get_num_threads(), measurements, links, whole, inside)
    figures = TypeAdapter(_RankFigures)
    everything = exchange(figures.dump_python(found, mode="json"))
    return _described([*map(figures.validate_python, everything)], nodes, base) if rank == 0 else None


def _host() -> int:
    """What tells the host of this rank from others: the launcher's number of it, as names may repeat in containers."""
    group = os.environ.get("GROUP_RANK")
    return int(group) if group else zlib.crc32(socket.gethostname().encode())


def _nodes(hosts: Sequence[int]) -> list[list[int]]:
    """
    >>> _nodes([7, 7, 8])
    [[0, 1], [2]]
    """
    found = [list(ranks) for _, ranks in groupby(range(len(hosts)), key=lambda rank: hosts[rank])]
    if len(found) != len(set(hosts)):
        raise InputError(
            f"the ranks of a host are not neighbours (hosts {', '.join(map(str, hosts))}): number ranks host by host"
        )
    return found


def _check_base(base: Cluster, nodes: list[list[int]]) -> None:
    wanted = [len(base.ranks_of(node)) for node in range(base.num_nodes)]
    started = [len(ranks) for ranks in nodes]
    if wanted != started:
        raise InputError(
            f"cluster '{base.name}' has nodes of {wanted} devices, but hosts with {started} ranks were started: start "
            "one rank per device, or name another cluster"
        )


# -- from what the ranks found to a description -----------------------------------------------------------------------


def _described(found: list[_RankFigures], nodes: list[list[int]], base: Cluster | None) -> Cluster:
    source = found[0].source
    links = {(link.sender, link.receiver): link for one in found for link in one.links}

    def matrix(name: str) -> tuple[tuple[float, ...], ...]:
        ranks = range(len(found))
        return tuple(tuple(getattr(links.get((a, b)), name, 0.0) for b in ranks) for a in ranks)

    measured = MeasuredBandwidth(
        between="ranks",
        bandwidth=matrix("bandwidth"),
        latency_s=matrix("latency_s"),
        sources={"bandwidth": source, "latency_s": source},
    )
    return Cluster(
        name=base.name if base is not None else "probed",
        nodes=base.nodes if base is not None else _node_groups(found, nodes),
        measured=measured,
        collectives=_collectives(found, nodes, source),
    )


def _collectives(
    found: list[_RankFigures], nodes: list[list[int]], source: str
) -> tuple[MeasuredCollective, ...]:
    """Of all ranks, and of the ranks of a node: the slowest node, where all have equally many ranks."""
    curves = [("cluster", len(found), name, points) for name, points in found[0].whole.items()]
    if len({len(ranks) for ranks in nodes}) == 1 and len(nodes[0]) > 1 and len(nodes) > 1:
        for name in found[0].inside:
            of_nodes = [found[ranks[0]].inside[name] for ranks in nodes]
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


def _node_groups(found: list[_RankFigures], nodes: list[list[int]]) -> tuple[NodeGroup, ...]:
    """Runs of neighbouring nodes of equally many devices of one kind."""
    kinds = _kinds(found, nodes)
    made = {
        kind: _device_of(found, [nodes[node] for node, one in enumerate(kinds) if one == kind])
        for kind in set(kinds)
    }
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    links = [link for one in found for link in one.links]
    across = [link for link in links if node_of[link.sender] != node_of[link.receiver]]
    groups = []
    for kind, run in groupby(range(len(nodes)), key=lambda node: kinds[node]):
        members, group = list(run), made[kind]
        name = "local" if len(made) == 1 else f"local-{kind}"
        nics = "guess: the measured links are what counts"
        groups.append(
            NodeGroup(
                count=len(members),
                devices_per_node=len(nodes[members[0]]),
                num_nics=1,
                device=group.device.model_copy(update={"name": name}),
                intra_node=group.intra_node,
                inter_node=_middle(across or links, found[0].source),
                sources={"devices_per_node": found[0].source, "num_nics": nics},
            )
        )
    return tuple(groups)


def _kinds(found: list[_RankFigures], nodes: list[list[int]]) -> list[int]:
    """The kind of each node's devices, numbered as they come up."""
    first: list[tuple[float, int]] = []
    kinds = []
    for ranks in nodes:
        rate = _rate([found[rank] for rank in ranks])
        for kind, (known, size) in enumerate(first):
            if size == len(ranks) and max(rate / known, known / rate) < _SAME_SPEED:
                kinds.append(kind)
                break
        else:
            kinds.append(len(first))
            first.append((rate, len(ranks)))
    return kinds


def _rate(found: list[_RankFigures]) -> float:
    """FLOP/s of the largest matrix product, of the middle rank."""
    measured = (one.measurements for one in found if one.measurements is not None)
    return median_high(flop / seconds for flop, seconds in (m.matmul_seconds["fp32"][-1] for m in measured))


def _device_of(found: list[_RankFigures], nodes: list[list[int]]) -> NodeGroup:
    """A node of one kind: the figures of all such nodes pooled, and the middle link inside them."""
    members = [found[rank] for ranks in nodes for rank in ranks]
    pooled = [one.measurements for one in members if one.measurements is not None]
    size = len(nodes[0])
    group = describe(pooled, members[0].device_type, members[0].threads, size).nodes[0]
    inside = [
        link for ranks in nodes for rank in ranks for link in found[rank].links if link.receiver in ranks
    ]
    link = _middle(inside, members[0].source) if inside else group.intra_node
    return group.model_copy(update={"intra_node": link, "devices_per_node": size})


def _middle(links: list[LinkCurve], source: str) -> Link:
    names = ("latency_s", "bandwidth")
    figures = {name: median_high(getattr(link, name) for link in links) for name in names}
    return Link(**figures, sources=dict.fromkeys(figures, source))
