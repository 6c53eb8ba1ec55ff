"""The configurations a search looks at, and why others are none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stagewright.cluster import Cluster
from stagewright.estimation.megatron import Layout, Shape
from stagewright.estimation.megatron.layout import Recompute
from stagewright.planning.configure.balance import fewest_layers
from stagewright.planning.configure.lineup import has_equal_nodes, widest_unit
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
    """None: whole layers or nothing, and attention's core where its kernels are not fused, which keep its scores."""
    shards_optimizer: tuple[bool, ...] = (True,)
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    """A width that is given is the only one tried."""


@dataclass(frozen=True)
class Widths:
    """Everything that decides what one device computes for a microbatch."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    microbatch_size: int
    num_microbatches: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What the seconds of one layer depend on."""
        return self.tp, self.cp, self.ep, self.microbatch_size


def powers(largest: int) -> list[int]:
    """
    >>> powers(6)
    [1, 2, 4]
    """
    found = [1]
    while found[-1] * 2 <= largest:
        found.append(found[-1] * 2)
    return found


def widths(shape: Shape, cluster: Cluster, job: Job, bounds: Bounds) -> Iterator[Widths]:
    """All widths that use every device and divide the batch, the heads and the experts.

    Where nodes differ, no tensor-parallel group spans two of them.
    """
    devices, per_node = cluster.num_devices, widest_unit(cluster)
    experts = shape.experts.num_experts if shape.experts else 1
    tps = [bounds.tp] if bounds.tp else powers(min(bounds.largest_tp, per_node, shape.num_heads))
    cps = [bounds.cp] if bounds.cp else powers(bounds.largest_cp)
    eps = [bounds.ep] if bounds.ep else powers(min(bounds.largest_ep, experts))
    sizes = [bounds.microbatch] if bounds.microbatch else powers(bounds.largest_microbatch)
    for tp, cp in product(tps, cps):
        spread = tp if shape.experts else 1
        if not has_equal_nodes(cluster) and per_node % tp:
            continue
        if shape.num_heads % tp or job.sequence_length % (2 * cp if cp > 1 else 1) or devices % (tp * cp):
            continue
        for pp in _pipelines(devices // (tp * cp), shape.num_layers, bounds.pp):
            dp = devices // (tp * cp * pp)
            if job.global_batch % dp:
                continue
            samples = job.global_batch // dp
            for ep, size in product(eps, sizes):
                if samples % size == 0 and experts % (spread * ep) == 0 and (dp * cp) % ep == 0:
                    yield Widths(tp, cp, pp, dp, ep, size, samples // size)


def obstacle(shape: Shape, cluster: Cluster, job: Job, bounds: Bounds) -> str:
    """Why there are no widths: the first rule that a given one breaks, with the value and what to do."""
    devices, tp, cp, pp = cluster.num_devices, bounds.tp or 1, bounds.cp or 1, bounds.pp or 1
    given = " x ".join(f"{name} {width}" for name, width in (("tp", tp), ("cp", cp), ("pp", pp)) if width > 1)
    experts = shape.experts.num_experts if shape.experts else 0
    heads, unit = shape.num_heads, widest_unit(cluster)
    if heads % tp:
        return f"tp {tp} does not divide the {heads} attention heads: give a divisor"
    if not has_equal_nodes(cluster) and unit % tp:
        return f"tp {tp} does not divide the {unit} devices that every node has a multiple of: give a divisor"
    if cp > 1 and job.sequence_length % (2 * cp):
        return f"cp {cp} cuts samples into {2 * cp} equal parts, which {job.sequence_length} tokens are not: give another"
    if pp > shape.num_layers:
        return f"pp {pp} is more than the {shape.num_layers} layers: give fewer stages"
    if devices % (tp * cp * pp):
        return (
            f"{given} does not divide the {devices} devices of cluster '{cluster.name}': give widths that do"
        )
    if bounds.ep and bounds.ep > 1 and not experts:
        return f"ep {bounds.ep} spreads experts, and this model has none: leave out --ep"
    if bounds.ep and experts % bounds.ep:
        return f"ep {bounds.ep} does not divide the {experts} experts: give a divisor"
    if experts and experts % (tp * (bounds.ep or 1)):
        return f"tp {tp} x ep {bounds.ep or 1} does not divide the {experts} experts, which stay whole: give divisors"
    if bounds.ep and devices // (tp * pp) % bounds.ep:
        return f"ep {bounds.ep} does not divide the {devices // (tp * pp)} devices of a stage's replicas: give a divisor"
    if bounds.microbatch and job.global_batch % bounds.microbatch:
        return f"microbatches of {bounds.microbatch} do not divide the global batch of {job.global_batch}: give a divisor"
    size = f", microbatches of {bounds.microbatch}" if bounds.microbatch else ""
    with_given = f" with {given}" if given else ""
    return (
        f"no widths divide {devices} devices and a global batch of {job.global_batch}{with_given}{size}: change the "
        "batch or give other widths"
    )


def _pipelines(devices: int, num_layers: int, given: int | None) -> list[int]:
    if given is not None:
        return [given] if devices % given == 0 and given <= num_layers else []
    return [pp for pp in range(1, min(devices, num_layers) + 1) if devices % pp == 0]


def schedules(one: Widths, num_layers: int, bounds: Bounds) -> Iterator[tuple[str, int]]:
    """Families and stages per rank that these widths allow."""
    for chunks in bounds.chunks if one.pp > 1 else (1,):
        if chunks == 1:
            yield "1f1b", 1
        elif num_layers >= fewest_layers(one.pp * chunks) and one.num_microbatches % one.pp == 0:
            yield "interleaved-1f1b", chunks


def layout_of(
    one: Widths,
    job: Job,
    schedule: str,
    num_chunks: int,
    recompute: Recompute,
    shards: bool,
    layers: tuple[int, ...] | None,
) -> Layout:
    """The layout of one configuration; sequence parallelism goes with tensor parallelism."""
    return Layout(
        job.sequence_length,
        tp=one.tp,
        pp=one.pp,
        dp=one.dp,
        cp=one.cp,
        ep=one.ep,
        microbatch_size=one.microbatch_size,
        num_microbatches=one.num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
        sequence_parallel=one.tp > 1,
        recompute=recompute,
        shards_optimizer=shards and one.dp * one.cp > 1,
        overlaps_reduction=one.dp * one.cp > 1,
        layers_per_stage=layers,
    )
