"""The search space: parallel degrees, schedules, sharding and recomputation; and the reason if it is empty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from stagewright.cluster import Cluster
from stagewright.errors import InputError, check_names, nearest
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import expert_parallel_fault
from stagewright.graph.policy import attention_scores, has_regions
from stagewright.limits import MOST_ACTIONS
from stagewright.planning.configuration import RECOMPUTE, Configuration, Recompute
from stagewright.planning.job import Job
from stagewright.planning.partition.layers import fewest_layers
from stagewright.planning.prediction.sharding import check_shard_size, check_streamed, is_frozen
from stagewright.planning.prediction.units import check_shard_units
from stagewright.schedule import BUILDERS
from stagewright.schedule.sharding import NUM_BUFFERS

HostOptimizer = Literal["auto", "never", "always"]
HOST_OPTIMIZER: tuple[HostOptimizer, ...] = get_args(HostOptimizer)

Streamed = Literal["auto", "never", "always"]
STREAMED: tuple[Streamed, ...] = get_args(Streamed)

LossPieces = int | Literal["auto"]

JOINT = "joint"
"""Name that stands for cuts, placement and program from the joint search, in place of a schedule."""

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "breadth-first", JOINT)
"""Schedules tried under our own runtime."""

_OTHER_SCHEDULES = ("1f1b", "interleaved-1f1b")
"""Schedules tried under other runtimes, which support them."""

_STAGES_OF_LAYER = 2
"""Maximum number of stages into which a layer may be cut where a rank has several."""

_PARTS_OF_STREAMS = 1, 2, 4
"""Numbers of layers tried in a streamed stage."""

_LOOPED = ("interleaved-1f1b", "breadth-first")
"""Schedules that place any number of stages on a rank."""


@dataclass(frozen=True)
class Space:
    """The space of configurations that a search tries; a given degree is the only one tried, and None tries all.

    * `tp`, `sequence_parallel`, `cp`, `ep`: tensor, sequence, context and expert parallelism. Under our own runtime, which
      does not run the last two, these are 1 unless given;
    * `pp`, `dp`, `microbatch`: ranks of a pipeline, replicas, samples per microbatch;
    * `schedules`: names, "joint" among them; `chunks`: stages per rank of schedules that place any number;
    * `recompute`: what stages recompute: ``none``; ``full``, all but the inputs of layers; ``selective``, what the runtime
      selects; ``model``, what the model's own code checkpoints; or ``auto``, as much as memory requires;
    * `offload`: with ``auto``, whether stages may offload saved values to the host;
    * `zero`: ZeRO stages, 0 to 3; `shard_size`: shard group size; `shard_units`: units in which a stage is gathered and
      reduced, with 2 and 3, by default the fastest number;
    * `reduce_dtype`: type in which gradients are reduced over replicas; by default the one they are accumulated in;
    * `host_optimizer`: whether optimizer state and step are on the host's processors: ``never``, ``always``, or ``auto``, on
      ranks that lack memory, where that is faster than the alternatives;
    * `streamed`: whether weights are in host memory and copied to a device stage by stage, with one replica: ``never``,
      ``always``, or ``auto``, where devices lack memory;
    * `loss_pieces`: slices of a microbatch's tokens for which head and loss are evaluated one after the other; ``auto``:
      several where the logits take a large part of a device, or where memory is short on the rank that computes them;
    * `is_improved`: whether the best plans of the schedules are refined, and the joint search runs.
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
    streamed: Streamed = "auto"
    loss_pieces: LossPieces = "auto"
    is_improved: bool = True
    largest_tp: int = 8
    largest_cp: int = 8
    largest_ep: int = 64
    largest_microbatch: int | None = None

    @classmethod
    def of(cls, base: Space | None = None, **given: Any) -> Space:
        """Return `base` with fields by name; a single schedule, ZeRO stage, recompute setting or number of chunks need not
        be in a list.

        Raises:
            InputError: there is no such field.

        >>> Space.of(tp=2, zero=3, schedules=["1f1b"]).zero
        (3,)
        """
        check_names(given, [field.name for field in fields(cls)], "a search")
        for name in ("schedules", "chunks", "recompute", "zero"):
            if (value := given.get(name)) is not None:
                given[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        return replace(base or cls(), **given)

    def check(self, cluster: Cluster, job: Job) -> None:
        """Raise `InputError` for settings that contradict each other, or that the job's runtime does not support."""
        level = max((level or 0 for level in self.zero or ()), default=0)
        check_shard_size(level, self.shard_size)
        check_shard_units(level, self.shard_units)
        for name in self.schedules or ():
            if name != JOINT and name not in BUILDERS:
                choices = ", ".join((*sorted(BUILDERS), JOINT))
                raise InputError(
                    f"unknown schedule '{name}'{nearest(name, (*BUILDERS, JOINT))}; known: {choices}"
                )
        for setting in self.recompute or ():
            if setting not in RECOMPUTE:
                raise InputError(
                    f"--recompute {setting}{nearest(setting, RECOMPUTE)}: give {' or '.join(RECOMPUTE)}"
                )
        if self.streamed not in STREAMED:
            raise InputError(
                f"--streamed {self.streamed}{nearest(self.streamed, STREAMED)}: give auto, never or always"
            )
        if self.streamed == "always":
            check_streamed((self.dp or 1) * (self.cp or 1), level, job)
        job.check_whole(self.tp or 1, level)
        if job.runtime == STAGEWRIGHT:
            return
        ours = {
            "--schedule": self.schedules is not None and not set(self.schedules) <= set(_OTHER_SCHEDULES),
            "--recompute": any(setting in ("auto", "model") for setting in self.recompute or ()),
            "--host-optimizer": self.host_optimizer == "always",
            "--reduce-dtype": self.reduce_dtype is not None,
            "--shard-units": self.shard_units is not None,
            "--loss-pieces": self.loss_pieces not in ("auto", 1),
        }
        if given := [name for name, is_given in ours.items() if is_given]:
            raise InputError(
                f"{', '.join(given)} are only for our own runtime, not for '{job.runtime}': leave them out, or leave out "
                "--runtime"
            )

    def of_runtime(self, job: Job) -> Space:
        """Return this space with the defaults of the job's runtime."""
        is_own = job.runtime == STAGEWRIGHT
        return replace(
            self,
            tp=self.tp or (None if job.kept.is_elementwise else 1),
            cp=self.cp or (1 if is_own else None),
            ep=self.ep or (1 if is_own else None),
            schedules=self.schedules or (SCHEDULES if is_own else _OTHER_SCHEDULES),
            largest_microbatch=self.largest_microbatch or (job.global_batch if is_own else 8),
        )

    @property
    def built_schedules(self) -> tuple[str, ...]:
        """The schedules that are built, not searched."""
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


def parallel_degrees(cluster: Cluster, job: Job, space: Space) -> Iterator[Configuration]:
    """Yield the tensor, context and expert parallel degrees to try; no tensor parallel group spans two nodes."""
    devices = cluster.num_devices
    node = math.gcd(*(group.devices_per_node for group in cluster.nodes))
    tps = [space.tp] if space.tp else [degree for degree in divisors(node) if degree <= space.largest_tp]
    cps = [space.cp] if space.cp else powers(min(space.largest_cp, devices))
    eps = [space.ep] if space.ep else powers(min(space.largest_ep, devices))
    for tp in tps:
        splits = tp > 1 and job.divides_tokens(space.sequence_parallel is not False)
        for cp in cps:
            if devices % (tp * cp) == 0 and job.sequence_length % (2 * cp if cp > 1 else 1) == 0:
                for ep in eps:
                    yield Configuration(tp=tp, cp=cp, ep=ep, sequence_parallel=splits)


def microbatch_sizes(degrees: Configuration, cluster: Cluster, job: Job, space: Space) -> list[int]:
    """Return the microbatch sizes to try, ascending: powers of two that divide a replica's share; of odd shares all
    divisors."""
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
    """Yield `degrees` with the numbers of pipeline ranks and replicas that use every device, divide the batch, suit the
    expert parallel degree, and whose programs are not too long to simulate."""
    devices = cluster.num_devices // (degrees.tp * degrees.cp)
    for pp in [space.pp] if space.pp else range(1, min(devices, max(most_stages, 1)) + 1):
        dp, remainder = divmod(devices, pp)
        if remainder or space.dp not in (None, dp) or job.global_batch % (dp * degrees.microbatch):
            continue
        count = job.global_batch // (dp * degrees.microbatch)
        fault = expert_parallel_fault(
            degrees.ep, dp * degrees.cp, degrees.tp, job.divides_tokens(degrees.sequence_parallel)
        )
        if 2 * pp * count <= MOST_ACTIONS and fault is None:
            yield replace(degrees, dp=dp, pp=pp, num_microbatches=count)


def most_stages(num_layers: int, cluster: Cluster, job: Job) -> int:
    """Return the maximum number of stages worth trying for a model of `num_layers` numbered layers."""
    if job.runtime != STAGEWRIGHT:
        return num_layers
    return min(cluster.num_devices, 4 * num_layers or cluster.num_devices)


def configurations(
    degrees: Configuration, graph: OperatorGraph, num_layers: int, cluster: Cluster, job: Job, space: Space
) -> Iterator[Configuration]:
    """Yield everything to try with these degrees and this microbatch.

    Args:
        graph: that of the model with these degrees, for any microbatch size.
        num_layers: numbered layers of the model.

    Raises:
        InputError: a recompute setting that the model does not support.
    """
    recomputes = _recomputes(graph, job, space)
    for shape in pipelines(degrees, cluster, job, space, most_stages(num_layers, cluster, job)):
        if space.streamed == "always":
            for recompute in recomputes:
                streamed = replace(shape, recompute=recompute, offload=space.offload)
                yield from streamed_configurations(streamed, num_layers, graph)
            continue
        for schedule, chunks in dict.fromkeys(_schedules(shape, num_layers, job, space)):
            for recompute in recomputes:
                for zero in _levels(shape.num_holders, cluster, job, space):
                    yield replace(
                        shape, schedule=schedule, chunks=chunks, recompute=recompute, zero=zero,
                        reduce_dtype=space.reduce_dtype, shard_size=space.shard_size,
                        shard_units=space.shard_units if (zero or 0) >= 2 else None,
                        host_optimizer=space.host_optimizer == "always",
                    )  # fmt: skip


def streamed_configurations(
    configuration: Configuration, num_layers: int, graph: OperatorGraph
) -> Iterator[Configuration]:
    """Yield the configurations of the same degrees with streamed weights, of one replica.

    Stages are looped around the ranks, and all microbatches pass a stage before the rank turns to its next one, so that one
    copy serves them all; the shortest stages are those of one layer. The optimizer is on the host unless the base is
    frozen. Source: RoundPipe (ITcarrot/RoundPipe), whose stages are dealt out to the devices in turn.
    """
    if configuration.num_holders > 1:
        return
    most = num_layers // configuration.pp
    for parts in _PARTS_OF_STREAMS:
        chunks = most // parts
        if chunks > NUM_BUFFERS:
            yield replace(
                configuration, schedule="breadth-first", chunks=chunks, zero=None, shard_units=None, shard_size=None,
                reduce_dtype=None, streamed=True, host_optimizer=not is_frozen(graph),
            )  # fmt: skip


def streamed_obstacle(num_layers: int) -> str:
    """Return why no configuration with streamed weights can be tried for a model of `num_layers` numbered layers."""
    return (
        f"streamed weights need one replica (--dp 1, with --pp x --tp as many as devices), and {NUM_BUFFERS + 1} stages a "
        f"rank of a layer or more, but the model has {num_layers} layers: use fewer devices, or leave out --streamed always"
    )


def _recomputes(graph: OperatorGraph, job: Job, space: Space) -> tuple[Recompute, ...]:
    if job.runtime == STAGEWRIGHT:
        return tuple(recompute_of(setting, graph) for setting in space.recompute or (None,))
    if space.recompute is not None:
        return space.recompute
    partly = job.profile.selective is not None or bool(attention_scores(graph))
    return ("none", "selective", "full") if partly else ("none", "full")


def recompute_of(setting: Recompute | None, graph: OperatorGraph) -> Recompute:
    """Return the recompute setting for a model; None is ``model`` if the model's own code checkpoints, else ``auto``.

    Raises:
        InputError: ``model`` for a model that checkpoints nothing.
    """
    if setting == "model" and not has_regions(graph):
        raise InputError(
            f"recompute 'model' recomputes what the model's own code checkpoints, and '{graph.name}' calls "
            "torch.utils.checkpoint nowhere: use auto, none or full"
        )
    return setting or ("model" if has_regions(graph) else "auto")


def _levels(num_holders: int, cluster: Cluster, job: Job, space: Space) -> tuple[int | None, ...]:
    """Return the ZeRO stages to try."""
    if num_holders == 1:  # nothing to shard, which a request for sharding alone leaves out
        return () if space.zero and all(space.zero) else (None,)
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
    """Yield the schedules that a pipeline allows, with the stages per rank of those that place any number."""
    for name in space.built_schedules if shape.pp > 1 else space.built_schedules[:1]:
        if name not in _LOOPED or shape.pp == 1:
            yield ("1f1b" if shape.pp == 1 and name in _LOOPED else name), None
            continue
        for chunks in space.chunks:
            if chunks == 1 and (name == "interleaved-1f1b" and "1f1b" in space.built_schedules):
                continue
            if chunks == 1 and name == "breadth-first" and "gpipe" in space.built_schedules:
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
    """Return why nothing can be tried: the first rule that a given degree breaks, with the value and the remedy.

    Args:
        most_stages: maximum number of stages into which the model can be cut; 0 if unknown.
    """
    devices, tp, cp, pp = cluster.num_devices, space.tp or 1, space.cp or 1, space.pp or 1
    named = ("tp", tp), ("cp", cp), ("pp", pp), ("dp", space.dp or 1)
    is_given = {name: getattr(space, name) is not None for name, _ in named}
    given = " x ".join(
        f"{name} {degree}" for name, degree in named if is_given[name] and (degree > 1 or name == "dp")
    )
    where = f"the {devices} devices of cluster '{cluster.name}'"
    if cp > 1 and job.sequence_length % (2 * cp):
        return f"cp {cp} cuts samples into {2 * cp} parts, which do not divide {job.sequence_length} tokens: change --cp"
    for name, degree in named:
        if degree > 1 and devices % degree:
            return f"{name} = {degree} does not divide {where}: use one of {', '.join(map(str, divisors(devices)))}"
    if most_stages and pp > most_stages:
        return f"pp {pp} is more than the {most_stages} stages into which the model can be cut: give a smaller --pp"
    if devices % (tp * cp * pp):
        return f"{given} does not divide {where}: give degrees that do"
    if space.dp and space.pp and tp * cp * pp * space.dp != devices:
        return f"{given} is not {where}: leave dp or pp out"
    splits = tp > 1 and space.sequence_parallel is not False
    if space.ep and (fault := expert_parallel_fault(space.ep, devices // (tp * pp), tp, splits)):
        return f"{fault}: give another --ep"
    if (dp := space.dp or (devices // (tp * cp * pp) if space.pp else 0)) and job.global_batch % dp:
        return f"dp = {dp} does not divide the global batch of {job.global_batch}: change the batch, or the degrees"
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
                f"a global batch of {job.global_batch:,} requires pipelines of {longest:,} ranks or more, but the model can "
                f"be cut into {most_stages:,} stages: use at most {most_stages * tp * cp:,} devices, or give a larger batch"
            )
        return (
            f"a global batch of {job.global_batch:,} makes programs of more than {MOST_ACTIONS:,} actions: give a smaller "
            "batch, or larger microbatches"
        )
    size = f", microbatches of {space.microbatch}" if space.microbatch else ""
    with_given = f" with {given}" if given else ""
    return (
        f"no parallel degrees divide {devices} devices and a global batch of {job.global_batch}{with_given}{size}: change "
        "the batch or give other degrees"
    )


def _shares(devices: int, job: Job, space: Space) -> Sequence[int]:
    """Return the samples per replica for all numbers of replicas that divide the batch, ascending."""
    replica_counts = (
        devices // pp
        for pp in divisors(devices)
        if space.pp in (None, pp) and space.dp in (None, devices // pp)
    )
    return sorted({job.global_batch // dp for dp in replica_counts if job.global_batch % dp == 0})
