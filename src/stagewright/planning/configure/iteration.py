"""Seconds of one step of a Megatron-style run: its program on the simulator, then gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import signature
from itertools import pairwise

import numpy as np

from stagewright.cluster import Cluster, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from stagewright.estimation.megatron import Layout, MegatronStack, Shape
from stagewright.estimation.megatron.fusion import Fusion
from stagewright.estimation.megatron.layer import Layers
from stagewright.estimation.megatron.seconds import Clock, StageSeconds
from stagewright.schedule import FAMILIES, Placement, Program, build
from stagewright.simulation import EncodedProgram, StageCosts, encode, simulate


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go; they add up."""

    pipeline_s: float
    """Passes of all microbatches with their bubbles and transfers."""
    reduce_s: float
    """Gradients over replicas, gathers of updated parameters, tied embeddings."""
    optimizer_s: float
    fixed_s: float
    """What the host does once per step."""

    @property
    def seconds(self) -> float:
        return self.pipeline_s + self.reduce_s + self.optimizer_s + self.fixed_s


@dataclass(frozen=True)
class Run:
    """One configuration of a Megatron-style run on a cluster.

    Ranks number tensor-parallel neighbours first, then context, then replicas, then stages.
    """

    shape: Shape
    layout: Layout
    stack: MegatronStack
    fusion: Fusion
    cluster: Cluster

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.shape, self.layout, self.stack, self.fusion, self.cluster)

    @cached_property
    def transfer_s(self) -> float:
        """One microbatch to the next stage."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        ranks, boundary = self.clock.ranks("pp"), self.clock.boundary_bytes
        links = [self.cluster.link_between(a, b) for a, b in pairwise(ranks)]
        gather = 0.0
        if self.fusion.scatters_boundaries and layout.tp > 1 and not layout.sequence_parallel:
            gather = all_gather_seconds(self.cluster, boundary, self.clock.ranks("tp"))
            boundary /= layout.tp
        return max(link.seconds(boundary) for link in links) + gather + self.fusion.peer_host_s

    def parameters(self, placed: Placement) -> tuple[tuple[int, int], ...]:
        """Per pipeline rank on one device: parameters of experts, and the others."""
        layers, layout = Layers(self.shape, self.layout, self.stack), self.layout
        counts = layout.layers(self.shape.num_layers)
        last, first, stages = len(counts) - 1, 0, []
        for stage, count in enumerate(counts):
            each = [layers.parameters(index) for index in range(first, first + count)]
            ends = layers.edge_parameters(stage == 0, stage == last)
            stages.append((sum(own for own, _ in each), sum(rest for _, rest in each) + ends))
            first += count
        return tuple(
            (
                sum(stages[stage][0] for stage in placed.stages_of(rank)),
                sum(stages[stage][1] for stage in placed.stages_of(rank)),
            )
            for rank in range(layout.pp)
        )

    def costs(self, stages: tuple[StageSeconds, ...] | None = None) -> StageCosts:
        """Stages as the simulator takes them; a transfer keeps its sender busy, as Megatron's does."""
        stages = stages or self.clock.stages
        last = len(stages) - 1
        engine, wait = self.fusion.pass_host_s, self.transfer_s
        forward = [s.forward.seconds + engine + wait * (i < last) for i, s in enumerate(stages)]
        whole = [s.backward.seconds + engine + wait * (i > 0) for i, s in enumerate(stages)]
        weights = [min(s.weight_grad.seconds, w) for s, w in zip(stages, whole, strict=True)]
        return StageCosts.of(forward, np.subtract(whole, weights), weights, backward_s=whole)

    def reduce_seconds(self, own: int, rest: int) -> float:
        """Gradients of so many parameters (of experts, and others) over the replicas of a stage."""
        layout, clock = self.layout, self.clock
        in_fp32 = self.stack.fp32_gradients if layout.fp32_gradients is None else layout.fp32_gradients
        width = 4 if in_fp32 else 2
        total = 0.0
        for count, axis in ((rest, "dp"), (own, "expert dp")):
            ranks = clock.ranks(axis)
            if not count or len(ranks) < 2:
                continue
            if layout.shards_optimizer:
                total += reduce_scatter_seconds(self.cluster, width * count, ranks)
                total += all_gather_seconds(self.cluster, 2.0 * count, ranks)
            else:
                total += all_reduce_seconds(self.cluster, width * count, ranks)
        return total

    def embedding_seconds(self) -> float:
        """Gradients of a tied embedding between its first and last stage."""
        layout = self.layout
        if layout.pp == 1 or not self.shape.tied:
            return 0.0
        layers = Layers(self.shape, layout, self.stack)
        table = layers.padded_vocabulary() * self.shape.hidden / layout.tp
        ranks = self.clock.ranks("pp")
        return all_reduce_seconds(self.cluster, 2.0 * table, (ranks[0], ranks[-1]))

    def optimizer_seconds(self, own: int, rest: int) -> float:
        """The update of a device's share of the optimizer's state."""
        layout = self.layout
        replicas = layout.dp * layout.cp
        shards = replicas if layout.shards_optimizer else 1
        share = rest / shards + own / (max(1, replicas // layout.ep) if layout.shards_optimizer else 1)
        return self.clock.device.memory_seconds(self.fusion.optimizer_bytes * share)

    def step(self, program: Program | None = None) -> StepTime:
        """The whole step.

        Ignores: overlap of gradients' reduction with the backward; skew between replicas; other users of the network.
        """
        layout = self.layout
        encoded = encoded_program(layout) if program is None else encode(program)
        pipeline = simulate(encoded, self.costs()).makespan_s
        counts = self.parameters(encoded.placement)
        reduces = max(self.reduce_seconds(own, rest) for own, rest in counts)
        optimizer = max(self.optimizer_seconds(own, rest) for own, rest in counts)
        return StepTime(pipeline, reduces + self.embedding_seconds(), optimizer, self.fusion.step_host_s)


def encoded_program(layout: Layout) -> EncodedProgram:
    """The layout's program as the simulator runs it."""
    return _encoded(layout.schedule, layout.pp, layout.num_microbatches, layout.num_chunks)


@lru_cache(maxsize=256)
def _encoded(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> EncodedProgram:
    has_chunks = "num_chunks" in signature(FAMILIES[schedule]).parameters
    return encode(build(schedule, pp, num_microbatches, num_chunks if has_chunks else None))
