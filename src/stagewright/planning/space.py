"""What a search tries: widths, schedules, sharding and savings, and why there may be nothing to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from stagewright.cluster import Cluster
from stagewright.errors import InputError, nearest
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import expert_parallel_fault
from stagewright.graph.policy import attention_scores, has_regions
from stagewright.limits import MOST_ACTIONS
from stagewright.planning.configuration import RECOMPUTE, Configuration, Recompute
from stagewright.planning.job import Job
from stagewright.planning.partition.layers import fewest_layers
from stagewright.planning.prediction.sharding import check_shard_size
from stagewright.planning.prediction.units import check_shard_units
from stagewright.schedule import FAMILIES

HostOptimizer = Literal["auto", "never", "always"]
HOST_OPTIMIZER: tuple[HostOptimizer, ...] = get_args(HostOptimizer)

LossPieces = int | Literal["auto"]

JOINT = "joint"
"""In place of the name of a schedule: cuts, placement and program from the joint search."""

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "breadth-first", JOINT)
"""Tried under our own runtime."""

_ELSEWHERE = ("1f1b", "interleaved-1f1b")
"""Tried under other runtimes, which have these."""

_STAGES_OF_LAYER = 2
"""Into so many stages a layer may be cut where a rank has several."""

_LOOPED = ("interleaved-1f1b", "breadth-first")
"""Schedules that place as many stages on a rank as is asked."""


@dataclass(frozen=True)
class Space:
    """What a search tries; a width that is given is the only one tried, and None tries all.

    * `tp`, `sequence_parallel`, `cp`, `ep`: ranks that share layers, whether they split the sequence between these, and
      ranks that divide samples and experts. Under our own runtime, which does not run the last two, they are 1 unless given;
    * `pp`, `dp`, `microbatch`: ranks of a pipeline, replicas, samples of a microbatch;
    * `schedules`: names, "joint" among them; `chunks`: stages per rank of those that place as many as is asked;
    * `recompute`: what stages recompute: ``none``; ``full``, all but what enters each layer; ``selective``, as the runtime
      says; ``model``, what the model's own code checkpoints; or ``auto``, as much as memory asks for;
    * `offload`: with ``auto``, whether stages may move what they save to the host and back;
    * `zero`: what ranks that hold the same parameters shard, 0 to 3, and `shard_size` among how many of them; `shard_units`:
      pieces in which they gather and reduce a stage, with 2 and 3, by default what is fastest;
    * `reduce_dtype`: type in which gradients are summed over replicas; by default the one they are added up in;
    * `host_optimizer`: whether the optimizer's state, and the step on it, are on the host's processors: ``never``,
      ``always``, or ``auto``, on ranks that lack memory, where that is faster than what else makes room;
    * `loss_pieces`: slices of a microbatch's tokens for which head and loss are evaluated one after the other; ``auto``:
      several where the logits are a large part of a device, or where memory is short on the rank that makes them.
    """

    tp: int | None = None
    sequence_parallel: bool | None = None
    cp: int | None = None
    ep: int | None = None
    pp: int | None = None
    dp: int | None = None
    microbatch: int | None = None
    schedules: tuple[str, ...] | None = None
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Recompute, ...] | None = None
    offload: bool = True
    zero: tuple[int | None, ...] | None = None
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    shard_size: int | None = None
    shard_units: int | None = None
    host_optimizer: HostOptimizer = "auto"
    loss_pieces: LossPieces = "auto"
    largest_tp: int = 8
    largest_cp: int = 8
    largest_ep: int = 64
    largest_microbatch: int | None = None

    @classmethod
    def of(cls, **given: Any) -> Space:
        """With a single schedule, level of sharding, way to recompute or number of chunks as it is.

        Raises:
            InputError: there is no such field.

        >>> Space.of(tp=2, zero=3, schedules=["1f1b"]).zero
        (3,)
        """
        names = [one.name for one in fields(cls)]
        for name, value in given.items():
            if name not in names:
                raise InputError(f"a search has no '{name}'{nearest(name, names)}; it has {', '.join(names)}")
            if name in ("schedules", "chunks", "recompute", "zero") and value is not None:
                given[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        return cls(**given)

    def check(self, cluster: Cluster, job: Job) -> None:
        """Raises `InputError` for what contradicts itself, or what the job's runtime does not do."""
        level = max((level or 0 for level in self.zero or ()), default=0)
        check_shard_size(level, self.shard_size)
        check_shard_units(level, self.shard_units)
        for name in self.schedules or ():
            if name != JOINT and name not in FAMILIES:
                known = ", ".join((*sorted(FAMILIES), JOINT))
                raise InputError(
                    f"unknown schedule '{name}'{nearest(name, (*FAMILIES, JOINT))}; known: {known}"
                )
        for way in self.recompute or ():
            if way not in RECOMPUTE:
                raise InputError(f"--recompute {way}{nearest(way, RECOMPUTE)}: give {' or '.join(RECOMPUTE)}")
        job.check_whole(self.tp or 1, level)
        if job.runtime == STAGEWRIGHT:
            return
        ours = {
            "--schedule": self.schedules is not None and not set(self.schedules) <= set(_ELSEWHERE),
            "--recompute": any(way in ("auto", "model") for way in self.recompute or ()),
            "--host-optimizer": self.host_optimizer == "always",
            "--reduce-dtype": self.reduce_dtype is not None,
            "--shard-units": self.shard_units is not None,
            "--loss-pieces": self.loss_pieces not in ("auto", 1),
        }
        if given := [name for name, is_given in ours.items() if is_given]:
            raise InputError(
                f"{', '.join(given)} say what our own runtime does, not what '{job.runtime}' does: leave them out, or leave "
                "out --runtime"
            )

    def of_runtime(self, job: Job) -> Space:
        """What is tried under the job's runtime where nothing is said."""
        is_own = job.runtime == STAGEWRIGHT
        return replace(
            self,
            tp=self.tp or (None if job.kept.is_elementwise else 1),
            cp=self.cp or (1 if is_own else None),
            ep=self.ep or (1 if is_own else None),
            schedules=self.schedules or (SCHEDULES if is_own else _ELSEWHERE),
            largest_microbatch=self.largest_microbatch or (job.global_batch if is_own else 8),
        )

    @property
    def families(self) -> tuple[str, ...]:
        """Schedules that are built, not searched."""
        return tuple(name for name in self.schedules or () if name != JOINT) or ("1f1b",)


def powers(largest: int) -> list[int]:
    """
    >>> powers(6)
    [1, 2, 4]
    """
    return [2**power for power in range(max(largest, 1).bit_length())]


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12), divisors(9)
    ([1, 2, 3, 4, 6, 12], [1, 3, 9])
    """
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def widths(cluster: Cluster, job: Job, space: Space) -> Iterator[Configuration]:
    """All that one microbatch of one sample may be tried with; no tensor-parallel group spans two nodes."""
    devices = cluster.num_devices
    node = math.gcd(*(group.devices_per_node for group in cluster.nodes))
    tps = [space.tp] if space.tp else [width for width in divisors(node) if width <= space.largest_tp]
    cps = [space.cp] if space.cp else powers(min(space.largest_cp, devices))
    eps = [space.ep] if space.ep else powers(min(space.largest_ep, devices))
    for tp in tps:
        splits = tp > 1 and space.sequence_parallel is not False
        for cp in cps:
            if devices % (tp * cp) == 0 and job.sequence_length % (2 * cp if cp > 1 else 1) == 0:
                for ep in eps:
                    yield Configuration(tp=tp, cp=cp, ep=ep, sequence_parallel=splits)


def microbatch_sizes(degrees: Configuration, cluster: Cluster, job: Job, space: Space) -> list[int]:
    """Samples of a microbatch to try, growing: powers of two that divide a replica's share; of odd shares all divisors."""
    if space.microbatch:
        sizes = [space.microbatch]
    else:
        most = space.largest_microbatch or job.global_batch
        shares = {
            shape.num_microbatches for shape in pipelines(degrees, cluster, job, space, cluster.num_devices)
        }
        divided = {
            size for share in shares for size in divisors(share) if share % 2 or size & (size - 1) == 0
        }
        sizes = sorted(size for size in divided if size <= most)
    return [
        size
        for size in sizes
        if any(pipelines(replace(degrees, microbatch=size), cluster, job, space, cluster.num_devices))
    ]


def pipelines(
    degrees: Configuration, cluster: Cluster, job: Job, space: Space, most_stages: int
) -> Iterator[Configuration]:
    """Yield `degrees` with the pipelines and replicas that use every device, divide the batch and the ranks of experts, and
    whose programs are not too long to simulate."""
    devices = cluster.num_devices // (degrees.tp * degrees.cp)
    for pp in [space.pp] if space.pp else range(1, min(devices, max(most_stages, 1)) + 1):
        dp, rest = divmod(devices, pp)
        if rest or space.dp not in (None, dp) or job.global_batch % (dp * degrees.microbatch):
            continue
        count = job.global_batch // (dp * degrees.microbatch)
        fault = expert_parallel_fault(degrees.ep, dp * degrees.cp, degrees.tp, degrees.sequence_parallel)
        if 2 * pp * count <= MOST_ACTIONS and fault is None:
            yield replace(degrees, dp=dp, pp=pp, num_microbatches=count)


def most_stages(num_layers: int, cluster: Cluster, job: Job) -> int:
    """Return the most stages worth trying for a model of so many numbered layers."""
    if job.runtime != STAGEWRIGHT:
        return num_layers
    return min(cluster.num_devices, 4 * num_layers or cluster.num_devices)


def configurations(
    degrees: Configuration, graph: OperatorGraph, num_layers: int, cluster: Cluster, job: Job, space: Space
) -> Iterator[Configuration]:
    """Yield everything to try with these degrees and this microbatch.

    Args:
        graph: of the model with these degrees, in microbatches of any size.
        num_layers: numbered layers of the model.

    Raises:
        InputError: a way to recompute that the model does not have.
    """
    for shape in pipelines(degrees, cluster, job, space, most_stages(num_layers, cluster, job)):
        for schedule, chunks in dict.fromkeys(_schedules(shape, num_layers, job, space)):
            for recompute in _recomputes(graph, job, space):
                for zero in _levels(shape.num_holders, cluster, job, space):
                    yield replace(
                        shape, schedule=schedule, chunks=chunks, recompute=recompute, zero=zero,
                        reduce_dtype=space.reduce_dtype, shard_size=space.shard_size,
                        shard_units=space.shard_units if (zero or 0) >= 2 else None,
                        host_optimizer=space.host_optimizer == "always",
                    )  # fmt: skip


def _recomputes(graph: OperatorGraph, job: Job, space: Space) -> tuple[Recompute, ...]:
    if job.runtime == STAGEWRIGHT:
        return tuple(recompute_of(way, graph) for way in space.recompute or (None,))
    if space.recompute is not None:
        return space.recompute
    partly = job.profile.selective is not None or bool(attention_scores(graph))
    return ("none", "selective", "full") if partly else ("none", "full")


def recompute_of(way: Recompute | None, graph: OperatorGraph) -> Recompute:
    """Return what `way` means for a model; None is what the model's own code says, and ``auto`` where it says nothing.

    Raises:
        InputError: ``model`` of a model that checkpoints nothing.
    """
    if way == "model" and not has_regions(graph):
        raise InputError(
            f"recompute 'model' recomputes what the model's own code checkpoints, and '{graph.name}' calls "
            "torch.utils.checkpoint nowhere: use auto, none or full"
        )
    return way or ("model" if has_regions(graph) else "auto")


def _levels(num_holders: int, cluster: Cluster, job: Job, space: Space) -> tuple[int | None, ...]:
    """Return the ZeRO stages to try."""
    if num_holders == 1:
        return (None,)
    if space.zero is not None:
        return space.zero
    if job.runtime != STAGEWRIGHT:
        return (2, 3) if job.profile.shard_units == "layers" else (1,)
    # On CPUs, gradient all-reduces cannot overlap with compute.
    levels = (None if cluster.kind == "cpu" else 0, 1, 2, 3)
    return levels if job.kept.is_elementwise else levels[:1]


def _schedules(
    shape: Configuration, num_layers: int, job: Job, space: Space
) -> Iterator[tuple[str, int | None]]:
    """Yield schedules, and stages per rank of those that place any number, that a pipeline allows."""
    for name in space.families if shape.pp > 1 else space.families[:1]:
        if name not in _LOOPED or shape.pp == 1:
            yield ("1f1b" if shape.pp == 1 and name in _LOOPED else name), None
            continue
        for chunks in space.chunks:
            if chunks == 1 and (name == "interleaved-1f1b" and "1f1b" in space.families):
                continue
            if chunks == 1 and name == "breadth-first" and "gpipe" in space.families:
                continue
            num_stages = shape.pp * chunks
            wanted = (
                num_stages // _STAGES_OF_LAYER if job.runtime == STAGEWRIGHT else fewest_layers(num_stages)
            )
            if num_layers < wanted:
                continue
            if name == "interleaved-1f1b" and shape.num_microbatches % shape.pp:
                continue
            if 2 * num_stages * shape.num_microbatches <= MOST_ACTIONS:
                yield name, chunks


def obstacle(cluster: Cluster, job: Job, space: Space, most_stages: int = 0) -> str:
    """Why there are no widths: the first rule that a given one breaks, with the value and what to do.

    Args:
        most_stages: into how many the model can be cut; 0 if that is not known.
    """
    devices, tp, cp, pp = cluster.num_devices, space.tp or 1, space.cp or 1, space.pp or 1
    named = ("tp", tp), ("cp", cp), ("pp", pp), ("dp", space.dp or 1)
    is_given = {name: getattr(space, name) is not None for name, _ in named}
    given = " x ".join(
        f"{name} {width}" for name, width in named if is_given[name] and (width > 1 or name == "dp")
    )
    where = f"the {devices} devices of cluster '{cluster.name}'"
    if cp > 1 and job.sequence_length % (2 * cp):
        return f"cp {cp} cuts samples into {2 * cp} equal parts, which {job.sequence_length} tokens are not: give another"
    for name, width in named:
        if width > 1 and devices % width:
            return f"{name} = {width} does not divide {where}: use one of {', '.join(map(str, divisors(devices)))}"
    if most_stages and pp > most_stages:
        return f"pp {pp} is more than the {most_stages} stages that the model is cut into at most: give a smaller --pp"
    if devices % (tp * cp * pp):
        return f"{given} does not divide {where}: give widths that do"
    if space.dp and space.pp and tp * cp * pp * space.dp != devices:
        return f"{given} is not {where}: leave dp or pp out"
    if space.ep and (fault := expert_parallel_fault(space.ep, devices // (tp * pp), tp, tp > 1)):
        return f"{fault}: give another --ep"
    if (dp := space.dp or (devices // (tp * cp * pp) if space.pp else 0)) and job.global_batch % dp:
        return f"dp = {dp} does not divide the global batch of {job.global_batch}: change the batch, or the widths"
    if space.microbatch and job.global_batch % space.microbatch:
        return f"microbatches of {space.microbatch} do not divide the global batch of {job.global_batch}: give a divisor"
    if space.microbatch and (shares := _shares(devices // (tp * cp), job, space)):
        if not any(share % space.microbatch == 0 for share in shares):
            return (
                f"microbatch = {space.microbatch} divides no replica's share of the global batch of {job.global_batch} "
                f"({', '.join(map(str, shares))} samples)"
            )
        return (
            f"a global batch of {job.global_batch:,} in microbatches of {space.microbatch:,} makes programs of more than "
            f"{MOST_ACTIONS:,} actions: give a smaller batch, or a --microbatch that divides it into fewer"
        )
    if shares := _shares(devices // (tp * cp), job, space):
        longest = devices // (tp * cp) * min(shares) // job.global_batch
        if most_stages and longest > most_stages:
            return (
                f"a global batch of {job.global_batch:,} leaves pipelines of {longest:,} ranks or more, and the model is "
                f"cut into {most_stages:,} stages at most: use at most {most_stages * tp * cp:,} devices, or give a larger "
                "batch"
            )
        return (
            f"a global batch of {job.global_batch:,} makes programs of more than {MOST_ACTIONS:,} actions: give a smaller "
            "batch, or larger microbatches"
        )
    size = f", microbatches of {space.microbatch}" if space.microbatch else ""
    with_given = f" with {given}" if given else ""
    return (
        f"no widths divide {devices} devices and a global batch of {job.global_batch}{with_given}{size}: change the "
        "batch or give other widths"
    )


def _shares(devices: int, job: Job, space: Space) -> Sequence[int]:
    """Samples of a replica, of all widths that divide the batch."""
    found = (
        devices // pp
        for pp in divisors(devices)
        if space.pp in (None, pp) and space.dp in (None, devices // pp)
    )
    return sorted({job.global_batch // dp for dp in found if job.global_batch % dp == 0})
