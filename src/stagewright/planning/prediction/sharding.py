"""Sharded data parallelism (ZeRO) in a plan: the actions that a program needs for it, and their seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from stagewright.cluster import (
    Cluster,
    Device,
    Host,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from stagewright.errors import InputError
from stagewright.estimation.runtime import STAGEWRIGHT, Runtime, load_runtime
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, PARAMETERS, FlatLayout
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.job import Job
from stagewright.schedule import Kind, Program, insert_gathers, insert_microbatch_gathers, insert_reductions
from stagewright.schedule.sharding import NUM_BUFFERS

SHARDING_KINDS = frozenset({Kind.GATHER, Kind.RELEASE, Kind.REDUCE})


def check_shard_size(zero: int | None, shard_size: int | None) -> None:
    """Raise `InputError` for a shard group size where nothing is sharded."""
    if shard_size is not None and not zero:
        raise InputError(
            f"shard_size = {shard_size} is the number of replicas to shard over, but --zero shards nothing: give "
            "--zero 1, 2 or 3, or leave out --shard-size"
        )


def check_streamed(num_holders: int, zero: int | None, job: Job) -> None:
    """Raise `InputError` where weights cannot be streamed."""
    if job.runtime != STAGEWRIGHT:
        raise InputError(
            f"runtime '{job.runtime}' does not stream weights from the host: leave out --streamed, or --runtime"
        )
    if num_holders > 1 or zero:
        several = f"--zero {zero} is for several" if zero else f"dp x cp makes {num_holders}"
        raise InputError(
            f"streamed weights are for one replica, but {several}: give --dp 1 and leave out --zero, or leave out --streamed"
        )


def is_frozen(graph: OperatorGraph) -> bool:
    """Return whether a model has parameters that are not trained; only these are then streamed."""
    return any(value not in graph.gradients for value in graph.parameters.values())


def sharded_program(
    program: Program,
    stages: Sequence[Stage],
    levels: Sequence[int],
    whole: Collection[int] = (),
    *,
    reduces_once: bool = False,
) -> Program:
    """Return `program` with the collectives that replicas need for the ZeRO stages `levels` of `stages`.

    Parameters of level 3 are gathered before use and released after it; those of the stages `whole`, all on one rank, are
    gathered once per microbatch. Where gradients are sharded, at most two stages have whole gradients at a time; with
    `reduces_once` all stages keep theirs until the last microbatch. Other gradients are all-reduced once, overlapped with
    the remaining backwards.
    """
    others = sorted(set(range(len(stages))) - set(whole))
    gathered = [stage for stage in others if levels[stage] >= PARAMETERS]
    scattered = [stage for stage in others if levels[stage] >= GRADIENTS]
    if gathered:
        reading = [stage for stage in gathered if reads_weights(stages[stage])]
        program = insert_gathers(program, NUM_BUFFERS, gathered, reading)
    if scattered:
        program = insert_reductions(program, None if reduces_once else NUM_BUFFERS, scattered)
    summed_once = sorted(set(others) - set(scattered))
    program = insert_reductions(program, None, summed_once) if summed_once else program
    return insert_microbatch_gathers(program, whole, reduces_once=reduces_once) if whole else program


def without_sharding(program: Program) -> Program:
    """Return `program` for a single replica."""
    return program.with_ranks(
        (action for action in actions if action.kind not in SHARDING_KINDS) for actions in program.ranks
    )


def reads_weights(stage: Stage) -> bool:
    """Return whether the weight gradient of a stage uses parameters or values computed from them.

    That of a normalisation does; that of a matmul needs only its input and output gradient.
    """
    derived = {value for node in stage.derived for value in node.outputs if value is not None}
    weights = derived.union(stage.parameters)
    return any(value in weights for node in stage.weight_grad.nodes for value in node.inputs)


def streamed_program(program: Program, stages: Sequence[Stage], updated_on_host: Collection[int]) -> Program:
    """Return `program` with the copies of streamed weights: of every stage from the host before use, and of the gradients of
    the stages `updated_on_host` to the host."""
    reading = [stage.index for stage in stages if reads_weights(stage)]
    program = insert_gathers(program, NUM_BUFFERS, weight_grads=reading)
    return insert_reductions(program, NUM_BUFFERS, updated_on_host) if updated_on_host else program


@dataclass(frozen=True)
class HostCopies:
    """The seconds of copies between a device and its host, of the streamed buffers of a rank.

    The link between the two has both directions at once. While every device of the node copies, the host's memory may be
    the slower of the two. Ignores: that offloaded values take the same link.
    """

    device: Device
    host: Host | None
    runtime: Runtime

    def gather(self, flats: Iterable[FlatLayout]) -> float:
        """Return the seconds to copy the parameters of `flats` to the device."""
        return self._seconds(sum(flat.num_elements * ITEM_BYTES[flat.dtype] for flat in flats))

    def reduce(self, flats: Iterable[FlatLayout]) -> float:
        """Return the seconds to copy the gradients of `flats` to the host."""
        precision = self.runtime.precision
        return self._seconds(
            sum(flat.num_elements * ITEM_BYTES[precision(flat.dtype).gradient] for flat in flats)
        )

    def _seconds(self, num_bytes: int) -> float:
        if self.device.shares_host_memory:  # read and written
            return self.device.memory_seconds(2 * num_bytes)
        in_memory_s = 0.0 if self.host is None else self.host.memory_seconds(num_bytes)
        return max(num_bytes / self.device.host_link_bandwidth, in_memory_s)


@dataclass(frozen=True)
class Collectives:
    """The seconds of the collectives over flat buffers of a rank's replicas, each collective on its own.

    `ranks` are the global ranks of the replicas, `reduce_dtype` is the type (a torch name) in which gradients are reduced.
    Of the ranks that hold a buffer, every `FlatLayout.num_shards` consecutive ones are a shard group; gradients are then
    all-reduced over the groups. Source: `stagewright.cluster.collectives`. Ignores: that collectives and transfers share the
    links.
    """

    cluster: Cluster
    ranks: Sequence[int]
    reduce_dtype: str | None = None
    runtime: Runtime = field(default_factory=lambda: load_runtime(STAGEWRIGHT))

    def shard_group(self, flat: FlatLayout) -> Sequence[int]:
        """Return the first shard group of a buffer."""
        return self.ranks[:: flat.every][: flat.num_shards]

    def copies(self, flat: FlatLayout) -> Sequence[int]:
        """Return the ranks that hold the same shard of a buffer."""
        return self.ranks[:: flat.every * flat.num_shards]

    def gather(self, flats: Iterable[FlatLayout]) -> float:
        """Return the seconds to all-gather the parameters of `flats`."""
        return sum(
            all_gather_seconds(
                self.cluster, flat.num_elements * ITEM_BYTES[flat.dtype], self.shard_group(flat)
            )
            for flat in flats
        )

    def reduce(self, flats: Iterable[FlatLayout]) -> float:
        """Return the seconds to all-reduce or reduce-scatter the gradients of `flats`."""
        seconds = 0.0
        for flat in flats:
            item = ITEM_BYTES[self.reduce_dtype or self.runtime.precision(flat.dtype).gradient]
            cost = reduce_scatter_seconds if flat.level >= OPTIMIZER else all_reduce_seconds
            seconds += cost(self.cluster, flat.num_elements * item, self.shard_group(flat))
            if flat.num_copies > 1:
                seconds += all_reduce_seconds(self.cluster, flat.summed_elements * item, self.copies(flat))
        return seconds


def gathered_flats(flats: Iterable[FlatLayout], stage: int) -> list[FlatLayout]:
    """Return the buffers that GATHER of a stage makes whole, unless another stage of its rank did."""
    return [flat for flat in flats if flat.level >= PARAMETERS and stage in flat.stages]


def reduced_flats(flats: Iterable[FlatLayout], stage: int, of_rank: Collection[int]) -> list[FlatLayout]:
    """Return the buffers that REDUCE of a stage reduces; the first stage of a rank reduces those of several stages."""
    return [
        flat
        for flat in flats
        if flat.is_trained and stage in flat.stages and stage == min(set(of_rank).intersection(flat.stages))
    ]
