"""Seconds of one step of a Megatron-style run: its program on the simulator, then gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from inspect import signature
from itertools import pairwise

import numpy as np

from stagewright.cluster import Cluster, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from stagewright.estimation.megatron import Layout, MegatronStack, Shape
from stagewright.estimation.megatron.fusion import Fusion
from stagewright.estimation.megatron.layer import Layers
from stagewright.estimation.megatron.seconds import Clock, LayerSeconds, StageSeconds
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
    known: dict[tuple[Layout, bool], LayerSeconds] = field(default_factory=dict, compare=False)
    """Layers timed before, as in `Clock`."""

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.shape, self.layout, self.stack, self.fusion, self.cluster, known=self.known)

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

    def parameters_of_ranks(self) -> tuple[tuple[int, int], ...]:
        """As `parameters`, for the layout's own schedule."""
        layout = self.layout
        return self.parameters(_encoded(layout.schedule, layout.pp, layout.pp, layout.num_chunks).placement)

    def gradient_bytes(self, own: int, rest: int) -> float:
        """Gradients of so many parameters as they are added up."""
        in_fp32 = (
            self.stack.fp32_gradients if self.layout.fp32_gradients is None else self.layout.fp32_gradients
        )
        return (4.0 if in_fp32 else 2.0) * (own + rest)

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
        total = 0.0
        for count, axis in ((rest, "dp"), (own, "expert dp")):
            ranks = clock.ranks(axis)
            if not count or len(ranks) < 2:
                continue
            if layout.shards_optimizer:
                total += reduce_scatter_seconds(self.cluster, self.gradient_bytes(count, 0), ranks)
                total += all_gather_seconds(self.cluster, 2.0 * count, ranks)
            else:
                total += all_reduce_seconds(self.cluster, self.gradient_bytes(count, 0), ranks)
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
        placement, pipeline = self._pipeline(program)
        counts = set(self.parameters(placement))
        reduces = max(self.reduce_seconds(own, rest) for own, rest in counts)
        optimizer = max(self.optimizer_seconds(own, rest) for own, rest in counts)
        return StepTime(pipeline, reduces + self.embedding_seconds(), optimizer, self.fusion.step_host_s)

    def _pipeline(self, program: Program | None) -> tuple[Placement, float]:
        """Placement and seconds of all passes.

        The layout's own schedules repeat themselves once all ranks alternate, so that two lengths tell all longer ones.
        """
        costs, layout = self.costs(), self.layout
        if program is not None:
            return program.placement, simulate(encode(program), costs).makespan_s
        count, pp = layout.num_microbatches, layout.pp
        short, longer = (2 * pp, 3 * pp) if layout.schedule in _PERIODIC else (count, count)
        if count <= longer:
            encoded = _encoded(layout.schedule, pp, count, layout.num_chunks)
            return encoded.placement, simulate(encoded, costs).makespan_s
        first, second = (
            simulate(_encoded(layout.schedule, pp, num, layout.num_chunks), costs).makespan_s
            for num in (short, longer)
        )
        placement = _encoded(layout.schedule, pp, short, layout.num_chunks).placement
        return placement, second + (count - longer) * (second - first) / pp


_PERIODIC = ("1f1b", "interleaved-1f1b")


@lru_cache(maxsize=256)
def _encoded(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> EncodedProgram:
    has_chunks = "num_chunks" in signature(FAMILIES[schedule]).parameters
    return encode(build(schedule, pp, num_microbatches, num_chunks if has_chunks else None))
