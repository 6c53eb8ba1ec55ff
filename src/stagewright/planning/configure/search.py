"""The search over all widths, schedules and savings of a Megatron-style run: bounds first, then memory, then time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.megatron import Layout, MegatronStack, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import Fusion, find_fusion
from stagewright.estimation.megatron.layout import Recompute
from stagewright.estimation.megatron.seconds import Clock, LayerSeconds, PassSeconds
from stagewright.planning.configure.balance import balanced_layers
from stagewright.planning.configure.fitting import Memory, Room
from stagewright.planning.configure.iteration import Run, StepTime
from stagewright.planning.configure.space import Bounds, Widths, layout_of, schedules, widths
from stagewright.planning.job import Job


@dataclass(frozen=True)
class Configuration:
    """One configuration that fits, and what is predicted of it."""

    layout: Layout
    time: StepTime
    memory: Memory
    tokens_per_second: float
    mfu: float
    bound_s: float
    """What the step takes at least."""

    @property
    def step_s(self) -> float:
        return self.time.seconds


@dataclass(frozen=True)
class LeftOut:
    """Configurations that are none, by reason; `example` is the one nearest to being one."""

    reason: str
    num: int
    example: str


@dataclass(frozen=True)
class Configured:
    """Configurations, fastest first, and what was left out."""

    configurations: tuple[Configuration, ...]
    left_out: tuple[LeftOut, ...]
    num_widths: int
    num_bounded: int
    """Configurations whose bound is above the last one kept."""


def configure(
    shape: Shape,
    cluster: Cluster,
    job: Job,
    *,
    stack: str = "megatron-core+te",
    bounds: Bounds | None = None,
    keep: int = 10,
    report: Callable[[str], None] = lambda stage: None,
) -> Configured:
    """The `keep` fastest configurations of a model on a cluster of equal devices that fit in memory.

    Raises:
        InputError: a mixed cluster, a stack without kernels, or widths that leave nothing to try.
        PlanError: nothing fits; says what misses least.
    """
    search = _Search(shape, cluster, job, find_megatron_stack(stack), find_fusion(stack), bounds or Bounds())
    return search.run(keep, report)


@dataclass(frozen=True)
class _Candidate:
    widths: Widths
    schedule: str
    num_chunks: int
    recompute: Recompute
    shards: bool


@dataclass
class _Search:
    shape: Shape
    cluster: Cluster
    job: Job
    stack: MegatronStack
    fusion: Fusion
    bounds: Bounds
    known: dict[tuple[Layout, bool], LayerSeconds] = field(default_factory=dict)
    too_large: dict[str, tuple[int, float, str]] = field(default_factory=dict)

    def run(self, keep: int, report: Callable[[str], None]) -> Configured:
        self.cluster.device.matmul_flops(
            self.job.computed_in
        )  # refuses mixed clusters and unknown precisions
        found = list(widths(self.shape, self.cluster, self.job, self.bounds))
        if not found:
            raise InputError(
                f"no widths divide {self.cluster.num_devices} devices, a global batch of {self.job.global_batch} and "
                f"{self.shape.num_heads} heads: change the batch or give widths that do"
            )
        report(f"bounding {len(found)} widths")
        ordered = sorted((self.bound_s(one), next(_NUMBERS), one) for one in self.candidates(found))
        report(f"fitting {len(ordered)} configurations")
        best: list[tuple[float, int, Configuration]] = []
        bounded = 0
        for index, (bound, number, one) in enumerate(ordered):
            if len(best) == keep and bound >= -best[0][0]:
                bounded = len(ordered) - index
                break
            made = self.made(one, bound)
            if made is not None:
                (heapq.heappush if len(best) < keep else heapq.heappushpop)(
                    best, (-made.step_s, number, made)
                )
        if not best:
            raise PlanError(self.misses())
        fastest = tuple(made for _, _, made in sorted(best, key=lambda item: -item[0]))
        reasons = tuple(
            LeftOut(reason, num, text) for reason, (num, _, text) in sorted(self.too_large.items())
        )
        return Configured(fastest, reasons, len(found), bounded)

    def candidates(self, found: list[Widths]) -> Iterator[_Candidate]:
        for one in found:
            for schedule, num_chunks in schedules(one, self.shape.num_layers, self.bounds):
                for recompute in self.bounds.recompute:
                    for shards in self.bounds.shards_optimizer:
                        yield _Candidate(one, schedule, num_chunks, recompute, shards)

    def layers(self, one: Widths) -> tuple[LayerSeconds, PassSeconds, PassSeconds]:
        """A layer, embedding and head of these widths."""
        if one.sizes not in self._timed:
            layout = layout_of(replace(one, pp=1), self.job, "1f1b", 1, "none", False, None)
            clock = Clock(self.shape, layout, self.stack, self.fusion, self.cluster, known=self.known)
            ends = [
                sum(clock.passes(part), PassSeconds()) for part in (clock.body.embedding(), clock.body.head())
            ]
            self._timed[one.sizes] = clock.layer(self.shape.num_layers - 1), ends[0], ends[1]
        return self._timed[one.sizes]

    @cached_property
    def _timed(self) -> dict[tuple[int, int, int, int], tuple[LayerSeconds, PassSeconds, PassSeconds]]:
        return {}

    def bound_s(self, one: _Candidate) -> float:
        """No step is faster: all passes spread evenly over the stages, with the shortest fill and drain.

        Dense layers in front of those with experts count as nothing.
        """
        layer, _, head = self.layers(one.widths)
        each = sum(part.seconds for part in layer)
        if one.recompute == "full":
            each += layer[0].seconds
        num = self.shape.num_layers - (self.shape.num_dense if self.shape.experts else 0)
        stage = (num * each + head.seconds) / one.widths.pp
        return stage * one.widths.num_microbatches + (one.widths.pp - 1) / one.num_chunks * each * (
            num // (one.widths.pp)
        )

    def layout(self, one: _Candidate) -> Layout:
        layer, embedding, head = self.layers(one.widths)
        each = sum(part.seconds for part in layer)
        if one.recompute == "full":
            each += layer[0].seconds
        stages = one.widths.pp * one.num_chunks
        split = balanced_layers(self.shape.num_layers, stages, each, embedding.seconds, head.seconds)
        return layout_of(one.widths, self.job, one.schedule, one.num_chunks, one.recompute, one.shards, split)

    def made(self, one: _Candidate, bound: float) -> Configuration | None:
        layout = self.layout(one)
        memory = self.room.of(layout)
        if not memory.fits:
            self.note(layout, memory)
            return None
        run = Run(self.shape, layout, self.stack, self.fusion, self.cluster, self.known)
        step = run.step()
        tokens = self.job.global_batch * self.job.sequence_length / step.seconds
        peak = self.cluster.device.peak_flops.get(self.job.computed_in) or float("inf")
        mfu = tokens * self.flop_per_token / (peak * self.cluster.num_devices)
        return Configuration(layout, step, memory, tokens, mfu, bound)

    @cached_property
    def room(self) -> Room:
        return Room(self.shape, self.stack, self.job.usable_bytes(self.cluster.device))

    @cached_property
    def flop_per_token(self) -> float:
        """Of a forward and a backward, without what is computed a second time; attention counts half of its scores."""
        layout = Layout(self.job.sequence_length)
        body = Clock(self.shape, layout, self.stack, self.fusion, self.cluster).body
        parts = [body.layer(index) for index in range(self.shape.num_layers)] + [body.head()]
        flop = sum(kernel.num * kernel.flop for part in parts for kernel in part.forward.kernels)
        return 3 * flop / self.job.sequence_length

    def note(self, layout: Layout, memory: Memory) -> None:
        """Remember why a configuration is none."""
        reason = f"lacks memory with {layout.recompute} recomputation, tp {layout.tp}"
        num, least, text = self.too_large.get(reason, (0, float("inf"), ""))
        missing = memory.peak_bytes - memory.usable_bytes
        if missing < least:
            least, text = missing, f"{described(layout)} misses {missing / 2**30:.1f} GiB"
        self.too_large[reason] = (num + 1, least, text)

    def misses(self) -> str:
        if not self.too_large:
            return f"no schedule can be built for cluster '{self.cluster.name}': change the global batch"
        least = min(self.too_large.values(), key=lambda item: item[1])
        return (
            f"no configuration fits on cluster '{self.cluster.name}': {least[2]}, the least of all; use more devices, "
            "shorter samples, or a higher memory limit"
        )


_NUMBERS = count()


def described(layout: Layout) -> str:
    """
    >>> described(Layout(128, tp=2, pp=4, dp=2))
    'tp 2 pp 4 dp 2 b 1 1f1b'
    """
    parts = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    parts += [f"{name} {width}" for name, width in (("cp", layout.cp), ("ep", layout.ep)) if width > 1]
    parts += [f"b {layout.microbatch_size}", layout.schedule]
    if layout.num_chunks > 1:
        parts.append(f"x{layout.num_chunks}")
    if layout.recompute != "none":
        parts.append("recompute")
    return " ".join(parts)
