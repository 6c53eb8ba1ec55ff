"""Sharded data parallelism in a plan: which actions a program needs for the levels of its stages, and their seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from stagewright.cluster import Cluster, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from stagewright.errors import InputError
from stagewright.estimation.runtime import STAGEWRIGHT, Runtime, load_runtime
from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, PARAMETERS, FlatLayout
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.schedule import Kind, Program, insert_gathers, insert_microbatch_gathers, insert_reductions

NUM_BUFFERS = 2
"""Stages of which a rank holds gathered parameters, or whole gradients to add to, at once: one in use, one on its way."""

SHARDING_KINDS = frozenset({Kind.GATHER, Kind.RELEASE, Kind.REDUCE})


def check_shard_size(zero: int | None, shard_size: int | None) -> None:
    """Raises `InputError` for a size of the groups that share out where nothing is shared out."""
    if shard_size is not None and not zero:
        raise InputError(
            f"shard_size = {shard_size} says over how many replicas is sharded what --zero names, and nothing is: give "
            "--zero 1, 2 or 3, or leave out --shard-size"
        )


def sharded_program(
    program: Program,
    stages: Sequence[Stage],
    levels: Sequence[int],
    held: Collection[int] = (),
    *,
    reduces_once: bool = False,
) -> Program:
    """`program` with the actions that replicas need when `stages` are sharded as `levels` say; those of `held`, of one rank,
    stay whole through each microbatch.

    Parameters of level 3 are gathered before use and released after; where gradients are sharded, those of two stages at
    most are whole at a time, or with `reduces_once` all that the microbatches add to, until the last one has; other
    gradients are summed once, under the backwards that are left.
    """
    everything = sorted(set(range(len(stages))) - set(held))
    gathered = [stage for stage in everything if levels[stage] >= PARAMETERS]
    scattered = [stage for stage in everything if levels[stage] >= GRADIENTS]
    if gathered:
        reading = [stage for stage in gathered if reads_weights(stages[stage])]
        program = insert_gathers(program, NUM_BUFFERS, gathered, reading)
    if scattered:
        program = insert_reductions(program, None if reduces_once else NUM_BUFFERS, scattered)
    rest = sorted(set(everything) - set(scattered))
    program = insert_reductions(program, None, rest) if rest else program
    return insert_microbatch_gathers(program, held, reduces_once=reduces_once) if held else program


def sharded_like(program: Program, num_buffers: int | None, other: Program) -> Program:
    """`other`, without split backwards, with sharding actions for the stages that have some in `program`, and room for the
    whole gradients of `num_buffers` stages."""
    stages = {
        kind: {action.stage for action in program if action.kind is kind}
        for kind in (Kind.GATHER, Kind.REDUCE)
    }
    if stages[Kind.GATHER]:
        other = insert_gathers(other, NUM_BUFFERS, stages[Kind.GATHER])
    return insert_reductions(other, num_buffers, stages[Kind.REDUCE]) if stages[Kind.REDUCE] else other


def without_sharding(program: Program) -> Program:
    """`program` for a single replica."""
    return program.with_ranks(
        (action for action in actions if action.kind not in SHARDING_KINDS) for actions in program.ranks
    )


def reads_weights(stage: Stage) -> bool:
    """Whether the weight gradient of a stage uses parameters, or what is derived from them.

    That of a normalisation does; that of a matrix product needs its input and cotangent alone.
    """
    derived = {value for node in stage.derived for value in node.outputs if value is not None}
    weights = derived.union(stage.parameters)
    return any(value in weights for node in stage.weight_grad.nodes for value in node.inputs)


@dataclass(frozen=True)
class Collectives:
    """Seconds that a rank's replicas take to share out flat buffers, each collective on its own.

    `ranks` are the global ranks of the replicas, `wire` the type (a torch name) in which gradients are summed. Of those
    that hold a buffer the first `FlatLayout.num_shards` share it out, and so do the next ones; then gradients are summed
    over these copies. Source: `stagewright.cluster.collectives`. Ignores: that gathers, sums and transfers share the links.
    """

    cluster: Cluster
    ranks: Sequence[int]
    wire: str | None = None
    runtime: Runtime = field(default_factory=lambda: load_runtime(STAGEWRIGHT))

    def sharing(self, flat: FlatLayout) -> Sequence[int]:
        """Ranks that share out a buffer among each other."""
        return self.ranks[:: flat.every][: flat.num_shards]

    def copies(self, flat: FlatLayout) -> Sequence[int]:
        """Ranks that hold the same part of a buffer."""
        return self.ranks[:: flat.every * flat.num_shards]

    def gather(self, found: Iterable[FlatLayout]) -> float:
        """Parameters made whole."""
        return sum(
            all_gather_seconds(self.cluster, flat.num_elements * ITEM_BYTES[flat.dtype], self.sharing(flat))
            for flat in found
        )

    def reduce(self, found: Iterable[FlatLayout]) -> float:
        """Gradients summed, on every replica or each replica's part on it."""
        seconds = 0.0
        for flat in found:
            item = ITEM_BYTES[self.wire or self.runtime.precision(flat.dtype).gradient]
            cost = reduce_scatter_seconds if flat.level >= OPTIMIZER else all_reduce_seconds
            seconds += cost(self.cluster, flat.num_elements * item, self.sharing(flat))
            if flat.num_copies > 1:
                seconds += all_reduce_seconds(self.cluster, flat.summed_elements * item, self.copies(flat))
        return seconds


def gathered_flats(found: Iterable[FlatLayout], stage: int) -> list[FlatLayout]:
    """What GATHER of a stage makes whole, if no other stage of its rank has."""
    return [flat for flat in found if flat.level >= PARAMETERS and stage in flat.stages]


def reduced_flats(found: Iterable[FlatLayout], stage: int, of_rank: Collection[int]) -> list[FlatLayout]:
    """What REDUCE of a stage sums; of parameters of several of its rank's stages, that of the first."""
    return [
        flat
        for flat in found
        if flat.is_trained and stage in flat.stages and stage == min(set(of_rank).intersection(flat.stages))
    ]
