"""The search over all widths, schedules and savings of a Megatron-style run: bounds first, then memory, then time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice, product

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.megatron import Layout, MegatronStack, Shape
from stagewright.estimation.megatron.fusion import Fusion, timed_stack
from stagewright.estimation.megatron.layout import Recompute
from stagewright.estimation.megatron.seconds import Clock, LayerKey, LayerSeconds, PassSeconds
from stagewright.planning.configure.balance import balanced_layers
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.configure.fitting import Memory, Room, usable_of_ranks
from stagewright.planning.configure.groups import GroupsClock, groups_differ
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.lineup import has_equal_nodes, kinds_of_ranks, orders
from stagewright.planning.configure.ranks import on_best_devices
from stagewright.planning.configure.space import Bounds, Widths, layout_of, obstacle, schedules, widths
from stagewright.planning.job import Job
from stagewright.planning.megatron import check_length, check_precision
from stagewright.units import format_bytes


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
    """The `keep` fastest configurations of a model on a cluster that fit in memory.

    Where links were measured each is timed with its ranks on the devices that suit it. On a cluster of several kinds of
    nodes stages get as many layers as their devices are fast and have memory for; fast nodes come first or last.

    Raises:
        InputError: a stack without kernels or one that does not train in the job's precision, samples longer than learned
            positions, or widths that leave nothing to try.
        PlanError: nothing fits; says what misses least.
    """
    return _search(shape, cluster, job, stack, bounds or Bounds()).run(keep, report)


def first_that_fit(
    shape: Shape,
    cluster: Cluster,
    job: Job,
    key: Callable[[Run], tuple[float, ...]],
    *,
    stack: str,
    bounds: Bounds,
    keep: int,
) -> Configured:
    """The first `keep` configurations that fit in memory, in the order of `key`, which sees each with its balanced layers.

    Raises:
        InputError, PlanError: as `configure` does.
    """
    return _search(shape, cluster, job, stack, bounds).run_in_order(key, keep)


def _search(shape: Shape, cluster: Cluster, job: Job, stack: str, bounds: Bounds) -> _Search:
    runtime, fusion = timed_stack(stack)
    check_precision(runtime, job)
    check_length(shape, job)
    return _Search(shape, cluster, job, runtime, fusion, bounds)


@dataclass(frozen=True)
class _Candidate:
    cluster: Cluster
    widths: Widths
    schedule: str
    num_chunks: int
    recompute: Recompute
    shards: bool


@dataclass(frozen=True)
class _Parts:
    """Seconds of one microbatch, forward and backward; of a layer also the forward alone, and of attention's core in it."""

    layer_s: float
    forward_s: float
    core_s: float
    embedding_s: float
    head_s: float

    def with_recompute(self, recompute: Recompute) -> float:
        again = {"none": 0.0, "selective": self.core_s, "full": self.forward_s}
        return self.layer_s + again[recompute]


@dataclass
class _Search:
    shape: Shape
    cluster: Cluster
    job: Job
    stack: MegatronStack
    fusion: Fusion
    bounds: Bounds
    known: dict[Cluster, dict[LayerKey, LayerSeconds]] = field(default_factory=dict)
    too_large: dict[str, tuple[int, float, str]] = field(default_factory=dict)

    def run(self, keep: int, report: Callable[[str], None]) -> Configured:
        clusters = orders(self.cluster, self.computed_in)
        found = self.widths()
        report(f"bounding {len(found)} widths")
        ordered = sorted((self.bound_s(one), next(_NUMBERS), one) for one in self.candidates(clusters, found))
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
        return Configured(fastest, self.reasons(), bounded)

    def run_in_order(self, key: Callable[[Run], tuple[float, ...]], keep: int) -> Configured:
        tried = self.candidates([self.cluster], self.widths())
        in_order = sorted((key(self.run_of(one, self.layout(one))), next(_NUMBERS), one) for one in tried)
        fitting = (made for _, _, one in in_order if (made := self.made(one, self.bound_s(one))) is not None)
        kept = tuple(islice(fitting, keep))
        if not kept:
            raise PlanError(self.misses())
        return Configured(kept, self.reasons(), 0)

    def widths(self) -> list[Widths]:
        found = list(widths(self.shape, self.cluster, self.job, self.bounds))
        if not found:
            raise InputError(obstacle(self.shape, self.cluster, self.job, self.bounds))
        return found

    def run_of(self, one: _Candidate, layout: Layout) -> Run:
        known = self.known.setdefault(one.cluster, {})
        return Run(self.shape, layout, self.stack, self.fusion, one.cluster, known)

    def reasons(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(reason, num, text) for reason, (num, _, text) in sorted(self.too_large.items()))

    def candidates(self, clusters: Iterable[Cluster], found: Iterable[Widths]) -> Iterator[_Candidate]:
        for cluster, one in product(clusters, found):
            for schedule, num_chunks in schedules(one, self.shape.num_layers, self.bounds):
                for recompute in self.recomputes:
                    for shards in self.bounds.shards_optimizer:
                        yield _Candidate(cluster, one, schedule, num_chunks, recompute, shards)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        if self.bounds.recompute is not None:
            return self.bounds.recompute
        return ("none", "full") if self.stack.flash_attention else ("none", "selective", "full")

    def parts(self, cluster: Cluster, one: Widths, first_rank: int) -> _Parts:
        """One layer and the ends of these widths on the devices from a rank on."""
        key = cluster, one.sizes, first_rank
        if key not in self._timed:
            layout = layout_of(replace(one, pp=1), self.job, "1f1b", 1, "none", False, None)
            given = self.shape, layout, self.stack, self.fusion, cluster
            if groups_differ(cluster, layout):
                clock: Clock = GroupsClock(*given, num_ranks=cluster.num_devices, fastest=True)
            else:
                clock = Clock(*given, first_rank, self.known.setdefault(cluster, {}))
            layer = clock.layer(self.shape.num_layers - 1)
            first, last = (
                sum(clock.passes(part), PassSeconds()).seconds
                for part in (clock.body.embedding(), clock.body.head())
            )
            core = clock.pass_seconds(clock.body.core.forward).seconds
            self._timed[key] = _Parts(
                sum(part.seconds for part in layer), layer[0].seconds, core, first, last
            )
        return self._timed[key]

    @cached_property
    def _timed(self) -> dict[tuple[Cluster, tuple[int, int, int, int], int], _Parts]:
        return {}

    def ranks(self, one: _Candidate) -> list[_Parts]:
        """Per pipeline rank, on the slowest of the kinds of devices that hold it."""
        if has_equal_nodes(one.cluster):
            return [self.parts(one.cluster, one.widths, 0)] * one.widths.pp
        return [
            max(
                (self.parts(one.cluster, one.widths, first) for first in block), key=lambda part: part.layer_s
            )
            for block in kinds_of_ranks(one.cluster, one.widths.pp)
        ]

    def bound_s(self, one: _Candidate) -> float:
        """No step is faster: all passes spread over the stages as their devices are fast, with the shortest fill and drain.

        Dense layers in front of those with experts count as nothing.
        """
        ranks, pp = self.ranks(one), one.widths.pp
        each = [part.with_recompute(one.recompute) for part in ranks]
        num = self.shape.num_layers - (self.shape.num_dense if self.shape.experts else 0)
        stage = (num + ranks[-1].head_s / each[-1]) / sum(1 / seconds for seconds in each)
        hops = pp - 1 if pp * one.num_chunks <= 2 else pp - 2  # of more stages the first may have no layer
        return stage * one.widths.num_microbatches + hops / one.num_chunks * min(each) * (num // pp)

    def layout(self, one: _Candidate, most: Sequence[int] = ()) -> Layout:
        """With layers balanced over the stages; `most` are those that each has room for."""
        ranks = self.ranks(one)
        each = [part.with_recompute(one.recompute) for part in ranks] * one.num_chunks
        split = balanced_layers(self.shape.num_layers, each, ranks[0].embedding_s, ranks[-1].head_s, most)
        return layout_of(one.widths, self.job, one.schedule, one.num_chunks, one.recompute, one.shards, split)

    def fitted(self, one: _Candidate) -> tuple[Layout, Memory]:
        """The balanced layout; where devices differ and one lacks memory, others take its layers as far as they can."""
        layout = self.layout(one)
        usable = usable_of_ranks(self.job, one.cluster, layout.pp)
        memory = self.room.of(layout, usable)
        if memory.fits or has_equal_nodes(one.cluster):
            return layout, memory
        return self._shifted(one, layout, usable) or (layout, memory)

    def _shifted(self, one: _Candidate, layout: Layout, usable: list[int]) -> tuple[Layout, Memory] | None:
        num, counts = self.shape.num_layers, layout.layers(self.shape.num_layers)
        most = [num] * layout.num_stages
        for _ in range(_SHIFTS):
            for rank, peak in enumerate(self.room.peaks(layout)):
                if peak > usable[rank]:
                    for stage in range(rank, layout.num_stages, layout.pp):
                        most[stage] = min(counts[stage] - 1, int(counts[stage] * usable[rank] / peak))
            if min(most) < 1 or sum(most) < num:
                return None
            layout = self.layout(one, most)
            counts = layout.layers(num)
            memory = self.room.of(layout, usable)
            if memory.fits:
                return layout, memory
        return None

    def made(self, one: _Candidate, bound: float) -> Configuration | None:
        layout, memory = self.fitted(one)
        if not memory.fits:
            self.note(layout, memory)
            return None
        run = self.run_of(one, layout)
        step = run.step()
        tokens = self.job.global_batch * self.job.sequence_length / step.seconds
        mfu = tokens * self.flop_per_token / self.peak_flops
        made = Configuration(layout, step, memory, tokens, mfu, bound, one.cluster, one.cluster)
        if one.cluster.measured is None or not has_equal_nodes(one.cluster):
            return made
        return on_best_devices(made, run, self.room, self.job, _MOVES)

    @cached_property
    def room(self) -> Room:
        return Room(self.shape, self.stack)

    @property
    def computed_in(self) -> str:
        """The precision of products."""
        return self.stack.computes_in or self.job.computed_in

    @cached_property
    def peak_flops(self) -> float:
        """Of all devices together."""
        return sum(
            (group.device.peak_flops.get(self.computed_in) or float("inf"))
            * group.count
            * group.devices_per_node
            for group in self.cluster.nodes
        )

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
        how = "without" if layout.recompute == "none" else f"with {layout.recompute}"
        reason = f"lacks memory {how} recomputation, tp {layout.tp}"
        num, least, text = self.too_large.get(reason, (0, float("inf"), ""))
        missing = memory.peak_bytes - memory.usable_bytes
        if missing < least:
            least, text = missing, f"{described(layout)} misses {format_bytes(missing)}"
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
_MOVES = 4_000
"""Moves of ranks among measured links that decide between configurations."""
_SHIFTS = 6
"""Times that layers are taken from devices that lack memory."""


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
        parts.append("recompute" if layout.recompute == "full" else layout.recompute)
    return " ".join(parts)
