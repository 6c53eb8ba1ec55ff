"""Seconds of one step of a Megatron-style run: its program on the simulator, then gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import signature
from itertools import pairwise

import numpy as np

from stagewright.cluster import Cluster, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from stagewright.estimation.megatron import Layout, MegatronStack, Shape
from stagewright.estimation.megatron.fusion import Fusion
from stagewright.estimation.megatron.layer import Layers
from stagewright.estimation.megatron.seconds import Clock, LayerKey, LayerSeconds, StageSeconds
from stagewright.planning.configure.groups import GroupsClock, groups_differ
from stagewright.planning.configure.lineup import has_equal_nodes, kinds_of_ranks, node_of_ranks
from stagewright.schedule import FAMILIES, Placement, Program, build
from stagewright.simulation import EncodedProgram, StageCosts, Timeline, encode, simulate


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
    known: dict[LayerKey, LayerSeconds] = field(default_factory=dict, compare=False)
    """Layers timed before, as in `Clock`."""

    @cached_property
    def _differs(self) -> bool:
        """Whether groups of ranks on equal nodes have different links."""
        return groups_differ(self.cluster, self.layout)

    @property
    def _width(self) -> int:
        """Devices of a pipeline rank."""
        return self.layout.tp * self.layout.cp * self.layout.dp

    @cached_property
    def clock(self) -> Clock:
        given = self.shape, self.layout, self.stack, self.fusion, self.cluster
        return (
            GroupsClock(*given, num_ranks=self._width) if self._differs else Clock(*given, known=self.known)
        )

    @cached_property
    def clocks(self) -> tuple[Clock, ...]:
        """Per pipeline rank, that of the slowest of the kinds of devices that hold it."""
        if self._differs:
            return tuple(self.clock_from(rank * self._width) for rank in range(self.layout.pp))
        if has_equal_nodes(self.cluster):
            return (self.clock,) * self.layout.pp
        blocks = kinds_of_ranks(self.cluster, self.layout.pp)
        kinds = {first: self.clock_from(first) for block in blocks for first in block}
        last = self.shape.num_layers - 1
        return tuple(
            max(
                (kinds[first] for first in block),
                key=lambda one: sum(part.seconds for part in one.layer(last)),
            )
            for block in blocks
        )

    def clock_from(self, first_rank: int) -> Clock:
        """The clock of the devices from a rank on."""
        return self.clock if first_rank == 0 else replace(self.clock, first_rank=first_rank)

    @cached_property
    def stages(self) -> tuple[StageSeconds, ...]:
        """Every stage on the slowest of the kinds of devices that hold it."""
        if has_equal_nodes(self.cluster) and not self._differs:
            return self.clock.stages
        return tuple(
            self.clocks[stage % self.layout.pp].stages[stage] for stage in range(self.layout.num_stages)
        )

    def groups(self, axis: str, rank: int) -> tuple[tuple[int, ...], ...]:
        """The groups of devices that share an axis in a pipeline rank: all where their links differ, else the first; that of
        rank 0 where all ranks are equal."""
        clock = self.clocks[rank]
        if isinstance(clock, GroupsClock):
            return clock.groups(axis)
        first = 0 if has_equal_nodes(self.cluster) else rank * self._width
        return (tuple(first + device for device in self.clock.ranks(axis)),)

    def transfers(self, placed: Placement) -> list[tuple[float, float]]:
        """Seconds of one microbatch over every edge between stages, there and back; 0 within a device."""
        layout, boundary = self.layout, self.clock.boundary_bytes
        if layout.pp == 1:
            return [(0.0, 0.0)] * (placed.num_stages - 1)
        scatters = self.fusion.scatters_boundaries and layout.tp > 1 and not layout.sequence_parallel
        sent = boundary / layout.tp if scatters else boundary

        def one(a: int, b: int) -> float:
            if a == b:
                return 0.0
            behind = self._gathered_seconds(boundary, a, b) if scatters else 0.0
            return self._sent_seconds(sent, a, b) + behind + self.fusion.peer_host_s

        return [(one(a, b), one(b, a)) for a, b in pairwise(placed.rank_of_stage)]

    def _gathered_seconds(self, num_bytes: float, a: int, b: int) -> float:
        """Until the tensor-parallel devices of a rank have put together what came in parts."""
        width, nodes = self._width, node_of_ranks(self.cluster)
        crosses = nodes[a * width] != nodes[b * width]
        wait = self.fusion.scattered_wait_s if crosses else 0.0
        return wait + max(
            all_gather_seconds(self.cluster, num_bytes, ranks) for ranks in self.groups("tp", b)
        )

    def _sent_seconds(self, num_bytes: float, a: int, b: int) -> float:
        """From one pipeline rank to another, for the slowest of their devices; the first stands for all where links are
        equal."""
        cluster, width = self.cluster, self._width
        nodes, by_rank = node_of_ranks(cluster), cluster.measured is not None
        stands_for_all = has_equal_nodes(cluster) and not self._differs
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        for device in range(0, 1 if stands_for_all else width, 1 if by_rank else self.layout.tp):
            ends = a * width + device, b * width + device
            pairs.setdefault(ends if by_rank else (nodes[ends[0]], nodes[ends[1]]), ends)
        # As many devices of a node send at once as belong to one stage.
        return max(
            cluster.link_between(*ends, min(width, len(cluster.ranks_of(nodes[ends[0]])))).seconds(num_bytes)
            for ends in pairs.values()
        )

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
        return float(self.stack.gradient_element_bytes(self.layout.fp32_gradients)) * (own + rest)

    def costs(self, placed: Placement) -> StageCosts:
        """Stages as the simulator takes them, with the transfers for which they stand still."""
        stages, engine, how = self.stages, self.fusion.pass_host_s, self.fusion.transfers
        edges = self.transfers(placed)
        there = [0.0, *(edge for edge, _ in edges), 0.0]
        back = [0.0, *(edge for _, edge in edges), 0.0]
        sends, receives = how != "overlapped", how == "both block"
        forward = [
            s.forward.seconds + engine + sends * there[i + 1] + receives * there[i]
            for i, s in enumerate(stages)
        ]
        whole = [
            s.backward.seconds + engine + sends * back[i] + receives * back[i + 1]
            for i, s in enumerate(stages)
        ]
        weights = [min(s.weight_grad.seconds, w) for s, w in zip(stages, whole, strict=True)]
        return StageCosts.of(forward, np.subtract(whole, weights), weights, backward_s=whole)

    def simulated(self, program: Program | EncodedProgram) -> Timeline:
        """All passes of a program in time."""
        encoded = program if isinstance(program, EncodedProgram) else encode(program)
        travels: dict[tuple[int, int], float] = {}
        if self.fusion.transfers == "overlapped":
            for stage, (there, back) in enumerate(self.transfers(encoded.placement)):
                travels |= {(stage, stage + 1): there, (stage + 1, stage): back}
        return simulate(encoded, self.costs(encoded.placement), travels or 0.0)

    def reduce_seconds(self, own: int, rest: int, rank: int = 0) -> tuple[float, float]:
        """Over the replicas of a pipeline rank: gradients of so many parameters (of experts, and others), and gathers of
        what became of them."""
        key = own, rest, rank if self._differs or not has_equal_nodes(self.cluster) else 0
        known = self._reduced.get(key)
        if known is not None:
            return known
        layout = self.layout
        reduce = gather = 0.0
        for count, axis in ((rest, "dp"), (own, "expert dp")):
            groups = self.groups(axis, rank)
            if not count or len(groups[0]) < 2:
                continue
            size, made = self.gradient_bytes(count, 0), float(self.stack.element_bytes) * count
            if layout.shards_optimizer:
                reduce += max(reduce_scatter_seconds(self.cluster, size, ranks) for ranks in groups)
                gather += max(all_gather_seconds(self.cluster, made, ranks) for ranks in groups)
            else:
                reduce += max(all_reduce_seconds(self.cluster, size, ranks) for ranks in groups)
        self._reduced[key] = reduce, gather
        return reduce, gather

    @cached_property
    def _reduced(self) -> dict[tuple[int, int, int], tuple[float, float]]:
        return {}

    def exposed_seconds(self, own: int, rest: int, placed: Placement, rank: int) -> float:
        """Of `reduce_seconds`, what no computation hides: one layer's part at least, and what outlasts the last backward
        or the first forward of a rank.

        Ignores: that collectives and computations slow each other down; bubbles, which hide more.
        """
        reduce, gather = self.reduce_seconds(own, rest, rank)
        if not self.layout.overlaps_reduction:
            return reduce + gather
        held = [self.stages[stage] for stage in placed.stages_of(rank)]
        num_layers = max(1, self.shape.num_layers // self.layout.pp)
        backward = sum(one.backward.device_s for one in held) * (1 - 1 / num_layers)
        forward = sum(one.forward.device_s for one in held) * (1 - 1 / num_layers)
        return max(reduce / num_layers, reduce - backward) + max(gather / num_layers, gather - forward)

    @property
    def embedding_bytes(self) -> float:
        """Of a device's part of the gradient that the first and last stage add up; 0 where they do not."""
        layout = self.layout
        if layout.pp == 1 or not self.shape.tied:
            return 0.0
        layers = Layers(self.shape, layout, self.stack)
        return self.stack.element_bytes * layers.padded_vocabulary() * self.shape.hidden / layout.tp

    def embedding_seconds(self) -> float:
        """Gradients of a tied embedding between its first and last stage."""
        size, last = self.embedding_bytes, (self.layout.pp - 1) * self._width
        firsts = range(self._width if self._differs else 1)
        return (
            max(all_reduce_seconds(self.cluster, size, (one, last + one)) for one in firsts) if size else 0.0
        )

    def optimizer_seconds(self, own: int, rest: int, rank: int = 0) -> float:
        """The update of a device's share of the optimizer's state, on a device of a pipeline rank."""
        layout = self.layout
        replicas = layout.dp * layout.cp
        shards = replicas if layout.shards_optimizer else 1
        share = rest / shards + own / (max(1, replicas // layout.ep) if layout.shards_optimizer else 1)
        return self.clocks[rank].device.memory_seconds(self.fusion.optimizer_bytes * share)

    def step(self, program: Program | None = None, by_span: bool = False) -> StepTime:
        """The whole step; with `by_span` a rank may begin the next before the others have ended this one.

        Only an optimizer that checks its gradients afterwards (Qi et al. 2023, section 4) allows that; then the longest
        span of a rank is what a step takes. Ignores: skew between replicas; other
        users of the network.
        """
        placement, pipeline = self._pipeline(program, by_span)
        counts = self.parameters(placement)
        reduces = max(self.exposed_seconds(*count, placement, rank) for rank, count in enumerate(counts))
        optimizer = max(self.optimizer_seconds(*count, rank) for rank, count in enumerate(counts))
        return StepTime(pipeline, reduces + self.embedding_seconds(), optimizer, self.fusion.step_host_s)

    def _pipeline(self, program: Program | None, by_span: bool) -> tuple[Placement, float]:
        """Placement and seconds of all passes.

        The layout's own schedules repeat themselves once all ranks alternate, so that two lengths tell all longer ones.
        """
        layout = self.layout
        if program is not None:
            found = self.simulated(program)
            return program.placement, float(found.span_s.max()) if by_span else found.makespan_s
        count, pp = layout.num_microbatches, layout.pp
        short, longer = (2 * pp, 3 * pp) if layout.schedule in _PERIODIC else (count, count)
        if count <= longer:
            encoded = _encoded(layout.schedule, pp, count, layout.num_chunks)
            return encoded.placement, self.simulated(encoded).makespan_s
        made = [_encoded(layout.schedule, pp, num, layout.num_chunks) for num in (short, longer)]
        first, second = (self.simulated(one).makespan_s for one in made)
        return made[0].placement, second + (count - longer) * (second - first) / pp


_PERIODIC = ("1f1b", "interleaved-1f1b")


@lru_cache(maxsize=256)
def _encoded(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> EncodedProgram:
    has_chunks = "num_chunks" in signature(FAMILIES[schedule]).parameters
    return encode(build(schedule, pp, num_microbatches, num_chunks if has_chunks else None))
