"""One way to train an encoder in a pipeline: its program, its memory and its simulated step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

from encoder_costs import ITEM_BYTES, LayerCosts
from stagewright.cluster import (
    Cluster,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from stagewright.schedule import Action, Kind, Program, build, insert_gathers, insert_reductions
from stagewright.simulation import EncodedProgram, StageCosts, encode, simulate
from stagewright.units import TERA

STATE_BYTES, _BUFFER_BYTES, _STEP_BYTES = 18.0, 6.0, 34.0
"""Per parameter of mixed-precision Adam: all state, weight and gradient, and what the optimizer step moves."""


class Overlap(Enum):
    """What runs beside the computations: every communication, or only some."""

    ALL = "all"
    NO_TRANSFERS = "transfers exposed"
    NO_COLLECTIVES = "gathers and reductions exposed"
    NONE = "all exposed"

    @property
    def hides_transfers(self) -> bool:
        return self in (Overlap.ALL, Overlap.NO_COLLECTIVES)

    @property
    def hides_collectives(self) -> bool:
        return self in (Overlap.ALL, Overlap.NO_TRANSFERS)


@dataclass(frozen=True)
class Configuration:
    """How a batch is spread over the cluster; ranks count tensor first, then data or pipeline parallel."""

    schedule: str
    tp: int
    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int
    num_chunks: int
    is_sharded: bool
    data_inside: bool
    overlap: Overlap
    scatters: bool = True
    """Whether the tensor-parallel ranks share the sending of a boundary value, or each sends all of it."""

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    def rank(self, pipeline: int, data: int) -> int:
        """The global rank of the first tensor-parallel rank."""
        place = pipeline * self.dp + data if self.data_inside else data * self.pp + pipeline
        return place * self.tp

    def __str__(self) -> str:
        loop = f" x{self.num_chunks}" if self.num_chunks > 1 else ""
        sharded = " FS" if self.is_sharded else ""
        batch = f"{self.num_microbatches}x{self.microbatch_size}"
        return f"TP{self.tp} PP{self.pp}{loop} DP{self.dp}{sharded}, {batch}"


@dataclass(frozen=True)
class Result:
    """A configuration simulated; `exposed_s` is what ends after the last computation of any rank."""

    configuration: Configuration
    step_s: float
    tflops: float
    memory_bytes: float
    bubble: float
    exposed_s: float


@cache
def program_of(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> Program:
    chunks = num_chunks if schedule in ("breadth-first", "interleaved-1f1b") else None
    return build(schedule, pp, num_microbatches, chunks)


@cache
def lowered(
    schedule: str, pp: int, num_microbatches: int, num_chunks: int, is_sharded: bool, hides: bool
) -> EncodedProgram:
    """With reductions, and gathers where the weights are sharded; exposed ones have nothing to run under:
    a stage is gathered when it is needed, and gradients are reduced after the last computation."""
    program = program_of(schedule, pp, num_microbatches, num_chunks)
    if is_sharded:
        program = insert_gathers(program, 2 if hides else 1)
        # there is room for the gradients of two stages, so a stage is reduced whenever a third is met
        return encode(insert_reductions(program, 2 if hides else 1))
    if hides:
        return encode(insert_reductions(program))
    return encode(
        program.with_ranks(
            [*actions, *(Action(Kind.REDUCE, stage) for stage in program.placement.stages_of(rank))]
            for rank, actions in enumerate(program.ranks)
        )
    )


@cache
def peak_activations(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> int:
    """Most stage activations that a rank holds."""
    program = program_of(schedule, pp, num_microbatches, num_chunks)
    costs = StageCosts.uniform(program.num_stages, saved_bytes=1.0)
    return int(simulate(program, costs).peak_bytes.max())


def memory_bytes(configuration: Configuration, layer: LayerCosts) -> float:
    """Of the fullest rank: state, kept layer inputs, and the layer at work (or the logits)."""
    c, model = configuration, layer.model
    layers = model.num_layers / c.num_stages
    parameters = model.layer_parameters * model.num_layers / (c.pp * c.tp)
    if c.is_sharded:
        num_buffers = min(2, c.num_chunks)
        state = STATE_BYTES * parameters / c.dp + num_buffers * _BUFFER_BYTES * parameters / c.num_chunks
    else:
        state = STATE_BYTES * parameters
    held = peak_activations(c.schedule, c.pp, c.num_microbatches, c.num_chunks)
    kept = held * layers * layer.boundary_bytes
    logits = 6.0 * layer.tokens * model.vocabulary / c.tp
    return state + kept + max(layer.activation_bytes, logits)


def transfer_s(c: Configuration, cluster: Cluster, num_bytes: float) -> float:
    """Of one boundary value, over the slowest boundary; each tensor-parallel rank sends its part and the
    receivers gather the parts, or each sends the whole value."""
    ranks = [c.rank(stage, 0) for stage in range(c.pp)]
    pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    share = num_bytes / c.tp if c.scatters else num_bytes
    sent = max(cluster.point_to_point_seconds(share, a, b) for a, b in pairs)
    return sent + (all_gather_seconds(cluster, num_bytes, range(c.tp)) if c.scatters else 0.0)


def collectives_s(c: Configuration, cluster: Cluster, num_bytes: float) -> tuple[float, float]:
    """Gather and reduction of a stage's weights over the replicas."""
    ranks = [c.rank(0, data) for data in range(c.dp)]
    if c.is_sharded:
        return all_gather_seconds(cluster, num_bytes, ranks), reduce_scatter_seconds(
            cluster, num_bytes, ranks
        )
    return 0.0, all_reduce_seconds(cluster, num_bytes, ranks)


def evaluate(c: Configuration, layer: LayerCosts) -> Result:
    """The optimizer step of a configuration, simulated."""
    model, cluster = layer.model, layer.cluster
    layers = model.num_layers // c.num_stages
    stages = np.arange(c.num_stages)
    is_first, is_last = stages == 0, stages == c.num_stages - 1
    forward = layers * layer.forward_s + is_last * layer.head_forward_s
    backward = layers * layer.backward_s + is_last * 2 * layer.head_forward_s
    transfer = transfer_s(c, cluster, layer.boundary_bytes) if c.pp > 1 else 0.0
    if not c.overlap.hides_transfers:
        # whoever made a value is busy until it has arrived
        forward, backward = forward + transfer * ~is_last, backward + transfer * ~is_first
        transfer = 0.0
    stage_bytes = ITEM_BYTES * model.layer_parameters * layers / c.tp
    gather, reduce = collectives_s(c, cluster, stage_bytes)
    costs = StageCosts.of(
        forward, backward / 2, backward / 2, backward_s=backward, gather_s=gather, reduce_s=reduce
    )
    sizes = (c.schedule, c.pp, c.num_microbatches, c.num_chunks, c.is_sharded, c.overlap.hides_collectives)
    timeline = simulate(lowered(*sizes), costs, transfer)
    parameters = model.layer_parameters * model.num_layers / (c.pp * c.tp * (c.dp if c.is_sharded else 1))
    step = timeline.makespan_s + cluster.device.memory_seconds(_STEP_BYTES * parameters)
    num_samples = c.dp * c.microbatch_size * c.num_microbatches
    computed = float(timeline.end_s[timeline.is_compute].max())
    return Result(
        c,
        step,
        model.hardware_flop(num_samples) / (step * cluster.num_devices * TERA),
        memory_bytes(c, layer),
        timeline.bubble_fraction,
        timeline.makespan_s - computed,
    )
