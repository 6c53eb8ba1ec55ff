"""The search over all widths, schedules and savings of a runtime: bounds from few graphs first, then whole predictions."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

import numpy as np

from stagewright.cluster import Cluster, Device
from stagewright.errors import ContractError, InputError, PlanError, StagewrightError, TraceError
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.estimation.stages import BodyCosts, Floats
from stagewright.graph import OperatorGraph
from stagewright.graph.graph import short_name
from stagewright.graph.policy import attention_scores
from stagewright.planning.advice import misses_memory
from stagewright.planning.arranging import on_devices_of
from stagewright.planning.candidate import (
    Candidate,
    Choice,
    Recompute,
    faster_candidate,
    make_candidate,
    make_plan,
)
from stagewright.planning.configure.balance import balanced_layers
from stagewright.planning.configure.layers import LayerCosts, Layers, stage_seconds, stage_sums
from stagewright.planning.configure.lineup import devices_of_ranks, has_equal_nodes, orders
from stagewright.planning.configure.space import (
    Bounds,
    Replicas,
    Sizes,
    obstacle,
    replicas,
    schedules,
    sizes,
)
from stagewright.planning.found import Excluded, Found, UntilCtrlC, operator_warnings
from stagewright.planning.job import Job
from stagewright.planning.pipeline import body_costs
from stagewright.planning.plan import Plan, shared_layers
from stagewright.planning.shortening import built
from stagewright.schedule import Kind
from stagewright.tracing.ahead import trace_ahead
from stagewright.tracing.cache import to_trace
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes

Trace = Callable[..., OperatorGraph]

_SHIFTS = 6
"""Times that layers are taken from devices that lack memory."""


def configure(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    bounds: Bounds | None = None,
    keep: int = 10,
    report: Callable[[str], None] = lambda stage: None,
    trace: Trace = cached_trace,
    interruptible: bool = False,
) -> Found:
    """The `keep` fastest configurations of a model under the job's runtime that fit in memory, as plans.

    Where links were measured ranks are on the devices that suit them. On a cluster of several kinds of nodes stages get as
    many layers as their devices are fast and have memory for; fast nodes come first or last.

    Raises:
        InputError: a runtime that does not train in the job's precision, or widths that leave nothing to try.
        TraceError: the model cannot be traced.
        PlanError: nothing fits; says what misses least.
    """
    search = _search(model, cluster, job, bounds or Bounds(), keep, report, trace)
    with UntilCtrlC(interruptible, search.best) as searching:
        search.gather()
        search.work_out()
    return searching.told(search.result())


def _search(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    bounds: Bounds,
    keep: int,
    report: Callable[[str], None],
    trace: Trace,
) -> _Search:
    job.check_stages()
    job.check_devices(cluster)
    reference = model if isinstance(model, ModelReference) else resolve(model)
    return _Search(reference, cluster, job, bounds, keep, report, trace)


@dataclass(frozen=True)
class _Waiting:
    """One configuration: what it decides, and the cluster as its ranks number it."""

    choice: Choice
    sizes: Sizes
    cluster: Cluster
    bound_s: float
    """No step is faster."""
    is_split: bool = False
    """Whether `choice` says how many layers each stage has, and the bound knows it."""


@dataclass
class _Search:
    reference: ModelReference
    cluster: Cluster
    job: Job
    bounds: Bounds
    keep: int
    report: Callable[[str], None]
    trace: Trace
    waiting: list[_Waiting] = field(default_factory=list)
    best: list[tuple[float, int, Plan]] = field(default_factory=list)
    """A heap of what was found, the slowest first."""
    excluded: list[Excluded] = field(default_factory=list)
    missing: tuple[int, str] | None = None
    """The fewest bytes that a configuration lacks by its bounds, and which that is."""
    nearest: Candidate | None = None
    without_rule: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)
    layers: dict[Sizes, Layers] = field(default_factory=dict)
    graphs: dict[Sizes, OperatorGraph] = field(default_factory=dict)
    splits: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    num_bounded: int = 0
    """Configurations that cannot be faster than the last of the best."""

    # -- bounds ------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Trace what is needed, and queue every configuration with a first bound on its seconds."""
        bounds, num_layers, has_experts = self.bounds, 0, False
        refused: dict[Sizes, StagewrightError] = {}
        tried = list(sizes(self.cluster, self.job, bounds))
        devices = self.cluster.num_devices
        possible = (next(replicas(one, self.cluster, self.job, bounds, devices), None) for one in tried)
        if (bounds.pp or 1) <= devices and not any(possible):  # whatever the model
            raise InputError(obstacle(self.cluster, self.job, bounds, num_layers))
        for number, one in enumerate(tried):
            # What ranks cannot share they cannot with larger microbatches either.
            if replace(one, microbatch_size=tried[0].microbatch_size) in refused:
                continue
            if one.ep > 1 and bounds.ep is None and not has_experts:
                continue
            self.report(f"widths {number + 1} of {len(tried)}: {_sized(one)}")
            try:
                graph = self.graph(one)
            except (InputError, TraceError, ContractError) as error:  # no such widths for this model
                refused[one] = error
                self.excluded.append(Excluded(str(error), 1, 1, one.microbatch_size, tp=one.tp))
                continue
            if len(self.graphs) == 1:
                has_experts = any(short_name(node.op) == "permute_rows" for node in graph)
                self._trace_ahead(one for one in tried if one.ep == 1 or has_experts or bounds.ep is not None)
            num_layers = self.costs(one, self.cluster.nodes[0].device).num_layers
            recomputes = self._recomputes(graph)
            for left in replicas(one, self.cluster, self.job, bounds, num_layers):
                self._queue(one, left, num_layers, recomputes)
        if not self.waiting:
            if refused and not self.graphs:
                raise next(iter(refused.values()))
            raise InputError(obstacle(self.cluster, self.job, bounds, num_layers))

    def traced(self, one: Sizes) -> dict[str, Any]:
        """What is asked of the tracer."""
        shared = shared_layers(one.tp, one.tp > 1, one.cp, one.ep)
        traced = self.job.traced(self.cluster.nodes[0].device.kind)
        return {"microbatch_size": one.microbatch_size, **traced, **shared, "expand": False}

    def _trace_ahead(self, tried: Iterable[Sizes]) -> None:
        """All that is `tried`, if what has been traced so far is kept."""
        if self.trace is cached_trace and not to_trace(self.reference, list(map(self.traced, self.graphs))):
            trace_ahead(self.reference, list(map(self.traced, tried)), self.report)

    def graph(self, one: Sizes) -> OperatorGraph:
        """Of one rank; may leave layers out."""
        if one not in self.graphs:
            self.graphs[one] = self.trace(self.reference, report=self.report, **self.traced(one))
        return self.graphs[one]

    def costs(self, one: Sizes, device: Device, recompute: Recompute = "none") -> LayerCosts:
        """Of every layer on one kind of device."""
        if one not in self.layers:
            self.layers[one] = Layers(self.graph(one), self.cluster, self.job)
        return self.layers[one].costs(device, recompute)

    def _queue(self, one: Sizes, left: Replicas, num_layers: int, recomputes: tuple[Recompute, ...]) -> None:
        for schedule, num_chunks in schedules(left, num_layers, self.bounds):
            for recompute in recomputes:
                for zero in self._levels(left.dp * one.cp):
                    choice = Choice(
                        left.dp, left.pp, one.microbatch_size, left.num_microbatches, schedule,
                        recompute=recompute == "full", selective=recompute == "selective", zero=zero, tp=one.tp,
                        sequence_parallel=one.tp > 1, cp=one.cp, ep=one.ep, num_chunks=num_chunks,
                    )  # fmt: skip
                    for cluster in self._orders:
                        bound_s = self.first_bound_s(choice, one, cluster)
                        self.waiting.append(_Waiting(choice, one, cluster, bound_s))

    @cached_property
    def _orders(self) -> tuple[Cluster, ...]:
        return orders(self.cluster, self.job.computed_in)

    def _recomputes(self, graph: OperatorGraph) -> tuple[Recompute, ...]:
        if self.bounds.recompute is not None:
            return self.bounds.recompute
        is_own = self.job.runtime == STAGEWRIGHT
        partly = self.job.profile.selective is not None or bool(attention_scores(graph) and not is_own)
        return ("none", "selective", "full") if partly else ("none", "full")

    def _levels(self, num_holders: int) -> tuple[int | None, ...]:
        if num_holders == 1:
            return (None,)
        if self.bounds.zero is not None:
            return self.bounds.zero
        return (2, 3) if self.job.profile.shard_units == "layers" else (1,)

    def first_bound_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """As if ranks could share the layers of every microbatch evenly, each on the fastest of their devices."""
        first, *others = {id(costs): costs for costs in self.columns(choice, one, cluster)}.values()
        whole_s = first.total_seconds
        if others:
            whole_s = float(np.min([costs.seconds for costs in (first, *others)], axis=0).sum())
        return choice.num_microbatches * whole_s / choice.pp

    def split_up(self, one: _Waiting) -> _Waiting | None:
        """With the layers of its stages; None, with the reason noted, where memory is known not to suffice."""
        choice = replace(one.choice, layers_per_stage=self.split(one.choice, one.sizes, one.cluster))
        missing = self._least_bytes(choice, one.sizes, one.cluster)
        if missing > 0:
            reason = f"lacks {format_bytes(missing)} of memory a device, or more"
            self.excluded.append(Excluded.of(choice, reason, missing))
            if self.missing is None or missing < self.missing[0]:
                self.missing = missing, str(choice)
            return None
        bound_s = self.bound_s(choice, one.sizes, one.cluster)
        return replace(one, choice=choice, bound_s=max(bound_s, one.bound_s), is_split=True)

    def columns(
        self, choice: Choice, one: Sizes, cluster: Cluster, recompute: Recompute | None = None
    ) -> list[LayerCosts]:
        """Of every stage: the costs of all layers on the slowest of its devices, recomputed as `choice` says or as asked."""
        how = recompute or choice.recomputed
        own = [self._slowest(one, devices, how) for devices in devices_of_ranks(cluster, choice.pp)]
        return own * (choice.num_chunks or 1)

    def _slowest(self, one: Sizes, devices: Sequence[Device], recompute: Recompute) -> LayerCosts:
        first, *others = (self.costs(one, device, recompute) for device in devices)
        return max((first, *others), key=lambda costs: float(costs.seconds.sum())) if others else first

    def split(
        self, choice: Choice, one: Sizes, cluster: Cluster, most: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Layers of every stage; None where the runtime's own partition is taken, or there are no layers."""
        columns = self.columns(choice, one, cluster)
        if choice.pp == 1 or not self.costs(one, self.cluster.nodes[0].device).num_layers:
            return None
        if most:
            return balanced_layers([each.seconds for each in columns], most)
        key = one, choice.pp, choice.num_chunks, choice.recomputed, cluster
        if key not in self.splits:
            self.splits[key] = balanced_layers([each.seconds for each in columns])
        return self.splits[key]

    def bound_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """No step is faster: every rank has its passes behind each other.

        In front of these and behind them there are those of one microbatch on the stages in front of its first; in between
        it waits for its first microbatch where that takes longer than the forwards it runs until then. There nothing is
        recomputed that may be while a rank waits.
        """
        columns = self.columns(choice, one, cluster)
        forward_s, backward_s = stage_seconds(columns, choice.layers_per_stage)
        first_s = forward_s + backward_s
        busy_s = first_s.reshape(-1, choice.pp).sum(axis=0)
        if self.job.profile.recomputes_ahead:
            plain = self.columns(choice, one, cluster, "none")
            first_s = np.add(*stage_seconds(plain, choice.layers_per_stage))
        passed = np.concatenate([[0.0], first_s[: choice.pp].cumsum()])
        fill = passed[:-1]
        if choice.num_stages == choice.pp:
            # Its first microbatch comes back while it runs the forwards of the next ones.
            ahead = np.minimum(np.arange(choice.pp, 0, -1), choice.num_microbatches) - 1
            fill = fill + np.maximum(0.0, passed[-1] - passed[1:] - ahead * forward_s)
        return float((busy_s * choice.num_microbatches + fill).max())

    def _least_bytes(self, choice: Choice, one: Sizes, cluster: Cluster) -> int:
        """What the first or the last rank lacks at the least: of state, and of what microbatches in flight keep."""
        costs = self.columns(choice, one, cluster)[0]
        kept, state = (
            stage_sums([column] * choice.num_stages, choice.layers_per_stage)
            for column in (costs.saved_bytes, costs.state_bytes)
        )
        share = choice.state_share(self.job.precision)
        lacking = []
        for rank in {0, choice.pp - 1}:
            usable = min(
                self.job.usable_bytes(device, cluster)
                for device in devices_of_ranks(cluster, choice.pp)[rank]
            )
            alive = _alive(choice.schedule, choice.pp, _enough(choice), choice.num_chunks or 1, rank)
            own = slice(rank, None, choice.pp)
            needed = share * state[own].sum() + float((alive @ kept[own]).max())
            lacking.append(needed - usable)
        return int(max(lacking))

    # -- predictions -------------------------------------------------------------------------------------------------

    def work_out(self) -> None:
        """Every configuration that waits, the most promising first, until no other can be among the best."""
        heap = [(one.bound_s, next(self.numbers), one) for one in self.waiting]
        heapq.heapify(heap)
        total = len(heap)
        while heap:
            bound_s, number, one = heapq.heappop(heap)
            if len(self.best) == self.keep and bound_s >= -self.best[0][0]:
                self.num_bounded += len(heap) + 1
                break
            if not one.is_split:
                if (split := self.split_up(one)) is not None:
                    heapq.heappush(heap, (split.bound_s, number, split))
                continue
            self.report(f"{total - len(heap)} of {total}: {one.choice}")
            plan = self.plan(one, -self.best[0][0] if len(self.best) == self.keep else math.inf)
            if plan is not None:
                item = (-plan.predictions.step_seconds, -next(self.numbers), plan)
                (heapq.heappush if len(self.best) < self.keep else heapq.heappushpop)(self.best, item)

    def body(self, one: Sizes) -> BodyCosts:
        """The whole graph's costs."""
        found = body_costs(self.graph(one), self.cluster, self.job)
        self.without_rule |= found.costing.without_rule
        return found

    def plan(self, one: _Waiting, below_s: float = math.inf) -> Plan | None:
        """The plan of a configuration; None, with the reason noted, where it does not fit, or not faster than `below_s`."""
        body = self.body(one.sizes)
        candidate = self.fitted(one, body, below_s)
        if candidate is None:
            self.num_bounded += 1
            return None
        missing, plan = candidate.excess_bytes, None
        if missing <= 0:
            plan = make_plan(candidate, body, self.reference)
            missing = max(
                rank.reserved_peak_bytes - candidate.line.usable_bytes(rank.rank)
                for rank in plan.predictions.ranks
            )
        if missing > 0:
            reason = f"lacks {format_bytes(missing)} of memory a device"
            self.excluded.append(Excluded.of(one.choice, reason, missing))
            if self.nearest is None or missing < self.nearest.excess_bytes:
                self.nearest = replace(candidate, excess_bytes=missing)
            return None
        assert plan is not None
        return on_devices_of(plan, self.cluster, one.cluster)

    def fitted(self, one: _Waiting, body: BodyCosts, below_s: float) -> Candidate | None:
        """With the layers that are fastest; where devices differ and one lacks memory, others take its layers as far as they
        can. None where a step is known to take `below_s` or longer; time is looked at first, because memory takes longer."""
        choice = one.choice
        found = faster_candidate(body, choice, one.cluster, self.job, below_s)
        if found is None:
            return None
        if found.excess_bytes <= 0 or has_equal_nodes(one.cluster) or choice.layers_per_stage is None:
            return found
        counts = choice.layers_per_stage
        most, tried = [sum(counts)] * len(counts), found
        for _ in range(_SHIFTS):
            line = tried.line
            for memory in tried.memories:
                usable = line.usable_bytes(memory.rank)
                if (excess := line.missing_bytes([memory])) > 0:
                    for stage in line.program.placement.stages_of(memory.rank):
                        most[stage] = min(counts[stage] - 1, int(counts[stage] * usable / (usable + excess)))
            if min(most) < 1 or sum(most) < sum(counts):
                break
            counts = self.split(choice, one.sizes, one.cluster, most) or counts
            tried = make_candidate(body, replace(choice, layers_per_stage=counts), one.cluster, self.job)
            if tried.excess_bytes <= 0:
                return tried
        return found

    def result(self) -> Found:
        """The best, fastest first.

        Raises:
            PlanError: there is none.
        """
        if not self.best:
            raise self._nothing_fits()
        plans = [plan for _, _, plan in sorted(self.best, key=lambda item: (-item[0], -item[1]))]
        beyond = self.job.beyond(self.cluster.device) if has_equal_nodes(self.cluster) else None
        warnings = operator_warnings(self.without_rule) + ([] if beyond is None else [beyond])
        return Found(plans, self.excluded, warnings, self.num_bounded)

    def _nothing_fits(self) -> PlanError:
        if self.nearest is not None:
            return misses_memory(self.nearest, self.job)
        assert self.missing is not None, "gathering ends in an error where nothing was bounded"
        missing, which = self.missing
        return PlanError(
            f"no configuration fits on cluster '{self.cluster.name}': {which} lacks {format_bytes(missing)} a device or "
            "more, the least of all; use more devices, shorter samples, or a higher memory limit"
        )


def _sized(one: Sizes) -> str:
    """
    >>> _sized(Sizes(2, 1, 1, 4))
    'tp 2, microbatch 4'
    """
    named = {"tp": one.tp, "cp": one.cp, "ep": one.ep}
    widths = [f"{name} {width}" for name, width in named.items() if width > 1]
    return ", ".join([*widths, f"microbatch {one.microbatch_size}"])


def _enough(choice: Choice) -> int:
    """Microbatches after which a program keeps no more than before."""
    wanted = choice.pp + 1 if (choice.num_chunks or 1) == 1 else 2 * choice.pp
    return min(choice.num_microbatches, wanted)


@lru_cache(maxsize=512)
def _alive(schedule: str, pp: int, num_microbatches: int, num_chunks: int, rank: int) -> Floats:
    """After every forward of a rank, of how many microbatches each of its stages keeps what it saves."""
    program = built(schedule, pp, num_microbatches, num_chunks if num_chunks > 1 else None)
    now: Counter[int] = Counter()
    rows: list[list[int]] = []
    for action in program.without_pairs().actions(rank):
        chunk = action.stage // pp
        if action.kind is Kind.F:
            now[chunk] += 1
            rows.append([now[each] for each in range(num_chunks)])
        elif action.kind in (Kind.B, Kind.W):
            now[chunk] -= 1
    return np.unique(np.array(rows, float), axis=0)
