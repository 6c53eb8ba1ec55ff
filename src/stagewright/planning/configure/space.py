"""The configurations a search over all widths looks at, and why there may be none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stagewright.cluster import Cluster
from stagewright.graph.expert_parallel import width_fault
from stagewright.planning.candidate import Recompute
from stagewright.planning.configure.balance import fewest_layers
from stagewright.planning.configure.lineup import widest_unit
from stagewright.planning.job import Job


@dataclass(frozen=True)
class Bounds:
    """What a search tries; widths are powers of two but for what is left to data parallelism."""

    largest_tp: int = 8
    largest_cp: int = 8
    largest_ep: int = 64
    largest_microbatch: int = 8
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Recompute, ...] | None = None
    """None: none and all of it, and what the runtime recomputes selectively, if anything."""
    zero: tuple[int, ...] | None = None
    """None: 1 where parameters stay whole on a rank, 2 and 3 where the runtime shares out layer by layer."""
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    """A width that is given is the only one tried."""


@dataclass(frozen=True)
class Sizes:
    """What the graph of one rank depends on."""

    tp: int
    cp: int
    ep: int
    microbatch_size: int


@dataclass(frozen=True)
class Replicas:
    """What is left to decide for given sizes: how long a pipeline is, and how many there are."""

    pp: int
    dp: int
    num_microbatches: int


def powers(largest: int) -> list[int]:
    """
    >>> powers(6)
    [1, 2, 4]
    """
    found = [1]
    while found[-1] * 2 <= largest:
        found.append(found[-1] * 2)
    return found


def sizes(cluster: Cluster, job: Job, bounds: Bounds) -> Iterator[Sizes]:
    """All that may be tried, smaller ones first; no tensor-parallel group spans two nodes."""
    devices = cluster.num_devices
    tps = [bounds.tp] if bounds.tp else powers(min(bounds.largest_tp, widest_unit(cluster)))
    cps = [bounds.cp] if bounds.cp else powers(min(bounds.largest_cp, devices))
    eps = [bounds.ep] if bounds.ep else powers(min(bounds.largest_ep, devices))
    batches = (
        [bounds.microbatch] if bounds.microbatch else powers(min(bounds.largest_microbatch, job.global_batch))
    )
    for tp, cp, ep, size in product(tps, cps, eps, batches):
        if devices % (tp * cp) == 0 and job.sequence_length % (2 * cp if cp > 1 else 1) == 0:
            yield Sizes(tp, cp, ep, size)


def replicas(one: Sizes, cluster: Cluster, job: Job, bounds: Bounds, num_layers: int) -> Iterator[Replicas]:
    """Pipelines and replicas that use every device and divide the batch and the ranks of experts."""
    devices = cluster.num_devices // (one.tp * one.cp)
    pps = [bounds.pp] if bounds.pp else range(1, min(devices, num_layers or 1) + 1)
    for pp in pps:
        dp, rest = divmod(devices, pp)
        if rest or job.global_batch % (dp * one.microbatch_size):
            continue
        if width_fault(one.ep, dp * one.cp, one.tp, one.tp > 1) is None:
            yield Replicas(pp, dp, job.global_batch // (dp * one.microbatch_size))


def schedules(one: Replicas, num_layers: int, bounds: Bounds) -> Iterator[tuple[str, int]]:
    """Families and stages per rank that these widths allow."""
    for chunks in bounds.chunks if one.pp > 1 else (1,):
        if chunks == 1:
            yield "1f1b", 1
        elif num_layers >= fewest_layers(one.pp * chunks) and one.num_microbatches % one.pp == 0:
            yield "interleaved-1f1b", chunks


def obstacle(cluster: Cluster, job: Job, bounds: Bounds, num_layers: int) -> str:
    """Why there are no widths: the first rule that a given one breaks, with the value and what to do."""
    devices, tp, cp, pp = cluster.num_devices, bounds.tp or 1, bounds.cp or 1, bounds.pp or 1
    given = " x ".join(f"{name} {width}" for name, width in (("tp", tp), ("cp", cp), ("pp", pp)) if width > 1)
    if cp > 1 and job.sequence_length % (2 * cp):
        return f"cp {cp} cuts samples into {2 * cp} equal parts, which {job.sequence_length} tokens are not: give another"
    if num_layers and pp > num_layers:
        return f"pp {pp} is more than the {num_layers} layers: give fewer stages"
    if devices % (tp * cp * pp):
        return (
            f"{given} does not divide the {devices} devices of cluster '{cluster.name}': give widths that do"
        )
    if bounds.ep and (fault := width_fault(bounds.ep, devices // (tp * pp), tp, tp > 1)):
        return f"{fault}: give another --ep"
    if bounds.microbatch and job.global_batch % bounds.microbatch:
        return f"microbatches of {bounds.microbatch} do not divide the global batch of {job.global_batch}: give a divisor"
    size = f", microbatches of {bounds.microbatch}" if bounds.microbatch else ""
    with_given = f" with {given}" if given else ""
    return (
        f"no widths divide {devices} devices and a global batch of {job.global_batch}{with_given}{size}: change the "
        "batch or give other widths"
    )
