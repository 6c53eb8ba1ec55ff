"""The one search: bound all configurations, partition and fit what promises most, improve the best, judge by predictions."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster
from stagewright.errors import ContractError, InputError, PlanError, StagewrightError, TraceError
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.graph import short_name
from stagewright.graph.policy import attention_scores
from stagewright.planning.advice import misses_memory
from stagewright.planning.arranging import cluster_for, on_devices_of
from stagewright.planning.assignment.device_order import has_equal_nodes, orders
from stagewright.planning.bounds.coarse import Coarse, Trace
from stagewright.planning.candidate import (
    Candidate,
    Choice,
    faster_candidate,
    fastest_partition,
    make_candidate,
    make_plan,
    make_program,
)
from stagewright.planning.estimate import graph_of
from stagewright.planning.found import Excluded, Found, Promised, UntilCtrlC, operator_warnings
from stagewright.planning.job import Job
from stagewright.planning.joint.finalists import MOST_FILLED, NUM_FINALISTS, finalists, joint_plans
from stagewright.planning.lengths import best_over_lengths
from stagewright.planning.loss_pieces import (
    PIECE_TOKENS,
    logits_bytes,
    pieces_by_share,
    pieces_of_tokens,
    short_of_memory,
)
from stagewright.planning.memory.fitting import Fitting, Partitioned, recompute_of
from stagewright.planning.memory.host_optimizer import checked
from stagewright.planning.partition.line import Within, partition_within
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.pipeline import allocatable_bytes, bodies_of, body_costs
from stagewright.planning.ranking import ranked
from stagewright.planning.space import (
    JOINT,
    Recompute,
    Replicas,
    Sizes,
    Space,
    microbatch_sizes,
    obstacle,
    replicas,
    schedules,
    widths,
)
from stagewright.schedule.in_flight import in_flight
from stagewright.tracing.ahead import Ahead
from stagewright.tracing.cache import to_trace
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes

KEPT = 5
"""Plans that a search comes back with at most, unless asked for more."""

_SHIFTS = 6
"""Times that layers are taken from devices that lack memory."""

_REFINED = 250
"""Stages of more operators are not looked at longer for what they recompute: it takes long and gains nothing."""

_WORTH_REFINING = 0.02
"""Part of its busy time that a plan must spend on saving for a longer look at what it recomputes, which gains some of it."""

_SLACK = 0.04
"""Part of a device's memory that the best plan must leave unused for it to be worked out with less room left free."""

_ROUGH = 0.02
"""Part of a step by which coarse costs of stages may be too high."""

_ALIKE = 0.005
"""Part of a step by which coarse costs are misjudged otherwise where the loss is evaluated in pieces."""

_NEAR = 0.05
"""Bounds of sizes of microbatches that differ by less than this part say nothing of which is the better."""

_WHOLE_BACKWARDS = "1f1b", "gpipe", "interleaved-1f1b", "breadth-first"
"""Schedules that run nothing while a rank waits for its first microbatch or for cotangents."""


@dataclass(frozen=True)
class Request:
    """What to plan, for what, within what."""

    model: ModelReference
    cluster: Cluster
    job: Job
    space: Space
    keep: int | None = None


def plan(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    space: Space | None = None,
    *,
    keep: int | None = None,
    report: Callable[[str], None] = lambda stage: None,
    trace: Trace = cached_trace,
    interruptible: bool = False,
    is_improved: bool = True,
    **within: Any,
) -> Found:
    """The best plans of `model` for `cluster` and `job`, under the job's runtime.

    Where links were measured, ranks are on the devices that suit them. On a cluster of several kinds of devices stages get
    as much of the model as their devices are fast and have memory for; fast ones come first or last.

    Args:
        space: what is tried; by default all that the runtime does.
        keep: how many plans; by default all that had to be worked out to find the best, five at most.
        within: fields of `Space` by name, in its place.
        report: told what the search is doing.
        trace: makes operator graphs; takes the arguments of `stagewright.tracing.cache.trace`.
        is_improved: whether to look longer at the best of the families, and jointly for better ones.
        interruptible: whether Ctrl-C ends the search with the plans found so far, once there is one; a warning says so.

    Raises:
        InputError: the model, device or a width cannot be used as given, or nothing is left to try.
        TraceError: the model cannot be traced.
        PlanError: no configuration fits; says by how much the best misses and what would fit.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model)
    space = space or Space.of(**within)
    job.check_stages()
    job.check_runtime()
    job = job.with_state(reference)
    job.check_devices(cluster)
    checked(space.host_optimizer, cluster)
    space.check(cluster, job)
    request = Request(reference, cluster, job, space.of_runtime(job), keep)
    search = (_OwnSearch if job.runtime == STAGEWRIGHT else _Search)(request, report, trace)
    with UntilCtrlC(interruptible, search.plans) as searching:
        search.gather()
        search.work_out()
        if is_improved or not search.plans:
            search.improve()
    return over_lengths(searching.told(search.result()), cluster, report, trace)


def over_lengths(
    found: Found,
    cluster: Cluster,
    report: Callable[[str], None] = lambda stage: None,
    trace: Trace = cached_trace,
) -> Found:
    """`found`, where batches have several lengths with what each takes, and the best over all of them first.

    Raises:
        PlanError: the model has other operators at some length, or no plan fits at all of them.
    """
    if not found.plans[0].job.sequence_lengths:
        return found
    report("judging all lengths")
    judged = best_over_lengths(found.plans, cluster, lambda plan: graph_of(plan, report, trace))
    return replace(found, plans=judged)


@dataclass(frozen=True)
class _Waiting:
    """One configuration: what it decides, and the cluster as its ranks number it."""

    choice: Choice
    sizes: Sizes
    cluster: Cluster
    saves: bool = False
    """Whether its stages may recompute and offload as much as memory asks for."""
    partitioned: Partitioned | None = None
    is_split: bool = False
    """Whether it is known where the model is cut, and the bound knows it."""
    later: tuple[tuple[Sizes, int], ...] = ()
    """The same in larger microbatches, and how many of these a batch has: looked at once it is known what this takes."""
    passes_s: float = 0.0
    """What its passes take: at the least, until it is split up."""
    busy_s: float = 0.0
    """Of these, what its ranks compute on the average, once it is split up."""
    bounded_by: Sizes | None = None
    """Where its own graph may not have been traced yet: that of smaller microbatches, of which its bound is known."""

    @property
    def graph_sizes(self) -> Sizes:
        """Of a graph that there is."""
        return self.bounded_by or self.sizes

    def grown(self) -> _Waiting:
        """The next of `later`."""
        (sizes, count), *others = self.later
        choice = replace(
            self.choice, microbatch_size=sizes.microbatch_size, num_microbatches=count, loss_pieces=sizes.loss_pieces,
            layers_per_stage=None,
        )  # fmt: skip
        return _Waiting(
            choice, sizes, self.cluster, self.saves, later=tuple(others), bounded_by=self.graph_sizes
        )


@dataclass(frozen=True)
class _Untraced:
    """Widths, in microbatches of one of several sizes, that have not been traced: the graph of narrower ones, `known`, says
    that a step takes `bound_s` at the least."""

    bound_s: float
    sizes: Sizes
    microbatch_sizes: Sequence[int]
    known: Sizes


class _Queue:
    """What waits, by a bound on its seconds; of equal bounds, what came first."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, _Waiting]] = []
        self.numbers = count()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[_Waiting]:
        return (one for _, _, one in self.entries)

    @property
    def least_s(self) -> float:
        return self.entries[0][0] if self.entries else math.inf

    def push(self, bound_s: float, one: _Waiting) -> None:
        heapq.heappush(self.entries, (bound_s, next(self.numbers), one))

    def keep(self, is_wanted: Callable[[_Waiting], bool]) -> None:
        """Only what is wanted."""
        self.entries = [entry for entry in self.entries if is_wanted(entry[2])]
        heapq.heapify(self.entries)

    def pop(self) -> tuple[float, _Waiting]:
        bound_s, _, one = heapq.heappop(self.entries)
        return bound_s, one


@dataclass
class _Search:
    """For a runtime that cuts between layers and recomputes every layer alike."""

    request: Request
    report: Callable[[str], None]
    trace: Trace
    plans: list[Plan] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    waiting: _Queue = field(default_factory=_Queue)
    made_of: dict[int, _Waiting] = field(default_factory=dict)
    """What plans, by identity, were made of."""
    missing: tuple[int, str] | None = None
    """The fewest bytes that a configuration lacks by its bounds, and which that is."""
    nearest: Candidate | None = None
    without_rule: set[str] = field(default_factory=set)
    untraced: list[_Untraced] = field(default_factory=list)
    refused: list[StagewrightError] = field(default_factory=list)
    num_bounded: int = 0
    """Configurations that cannot be faster than the last of the plans."""
    next_best: Promised | None = None
    """The first of these."""
    between_layers = True

    def __post_init__(self) -> None:
        asked = self.request
        self.cluster, self.job, self.space = asked.cluster, asked.job, asked.space
        self.coarse = Coarse(asked.model, asked.cluster, asked.job, self.report, self.trace)

    # -- bound -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Trace the smallest microbatches of all widths but those that narrower ones bound, and queue every configuration of
        these with a first bound."""
        space = self.space
        tried = {one: self._possible_sizes(one) for one in widths(self.cluster, self.job, space)}
        if not any(tried.values()):
            raise InputError(obstacle(self.cluster, self.job, space))  # whatever the model
        asked = {
            one: self.coarse.traced(self._with_pieces(replace(one, microbatch_size=sizes[0])))
            for one, sizes in tried.items()
            if sizes
        }
        has_experts, is_ahead = space.ep is not None, False
        with Ahead(self.request.model, list(asked.values()), self.report) as ahead:
            if self._is_kept():
                ahead.start(
                    [
                        asked[one]
                        for one in self._unbounded(one for one in asked if one.ep == 1 or has_experts)
                    ]
                )
            for one in asked:
                if one.ep > 1 and not has_experts:
                    continue
                if (known := self.coarse.narrower(one)) is not None:
                    self.untraced.append(_Untraced(self.coarse.wider_s(one, known), one, tried[one], known))
                else:
                    self._gather_width(one, tried[one])
                if self.coarse.graphs and not is_ahead:
                    is_ahead = True
                    graph = next(iter(self.coarse.graphs.values()))
                    has_experts |= any(short_name(node.op) == "permute_rows" for node in graph)
                    if self._is_kept():
                        wanted = (one for one in asked if one.ep == 1 or has_experts)
                        ahead.finish([asked[one] for one in self._unbounded(wanted)])
        self.untraced.sort(key=lambda one: one.bound_s)
        while self.untraced and not self.waiting:
            self._gather_untraced()
        if not self.waiting:
            if self.refused and self.missing is None:
                raise self.refused[0]
            most = 0
            if self.coarse.graphs:
                most = self._most_stages(self.coarse.costs(next(iter(self.coarse.graphs))).num_layers)
            if self.missing is None or not self.excluded:
                raise InputError(obstacle(self.cluster, self.job, space, most))

    def _gather_width(self, one: Sizes, sizes: Sequence[int]) -> None:
        """As `gather_sizes`; where the model has no such widths, why is noted."""
        try:
            self.gather_sizes(one, sizes)
        except (InputError, TraceError, ContractError) as error:
            self.refused.append(error)
            self.excluded.append(Excluded(str(error), 1, 1, tp=one.tp))

    def _gather_untraced(self) -> None:
        """The width that promises most of those that have not been traced."""
        first = self.untraced.pop(0)
        self._gather_width(first.sizes, first.microbatch_sizes)

    def _possible_sizes(self, one: Sizes) -> list[int]:
        """Samples of a microbatch that some pipelines and replicas allow."""
        found = microbatch_sizes(one, self.cluster, self.job, self.space)
        return [size for size in found if self._is_possible(replace(one, microbatch_size=size))]

    def _is_possible(self, one: Sizes) -> bool:
        left = replicas(one, self.cluster, self.job, self.space, self.cluster.num_devices)
        return next(left, None) is not None

    def gather_sizes(self, one: Sizes, sizes: Sequence[int]) -> None:
        """Queue all configurations of these widths, each in the smallest microbatches first; raises what the tracer does."""
        each = [self._with_pieces(replace(one, microbatch_size=size)) for size in sizes]
        self.report(f"widths of {each[0]}")
        costs = self.coarse.costs(each[0])
        found: dict[tuple[Choice, bool], list[tuple[Choice, Sizes]]] = {}
        for one in each:
            for left in replicas(
                one, self.cluster, self.job, self.space, self._most_stages(costs.num_layers)
            ):
                for choice, saves in self._choices(one, left, costs.num_layers, each[0]):
                    alike = replace(choice, microbatch_size=0, num_microbatches=0, loss_pieces=1)
                    found.setdefault((alike, saves), []).append((choice, one))
        for (_, saves), ((choice, own), *others) in found.items():
            later = tuple((sizes, other.num_microbatches) for other, sizes in others)
            bounded_by = None if own == each[0] else each[0]
            for cluster in self._orders:
                self._queue(_Waiting(choice, own, cluster, saves, later=later, bounded_by=bounded_by))

    def _queue(self, one: _Waiting, floor_s: float = 0.0) -> None:
        """By what it takes at the least in the best of its sizes, in all of which its passes take at least `floor_s`. Where
        larger microbatches promise much more, it waits by itself, and these do not wait for it."""
        one = replace(one, passes_s=floor_s)
        own_s = self._bound_s(one, floor_s)
        larger, larger_s = one, math.inf
        while larger.later:
            larger = larger.grown()
            larger_s = min(larger_s, self._bound_s(larger, floor_s))
        if larger_s * (1 + _NEAR) < own_s:
            self.waiting.push(own_s, replace(one, later=()))
            self._queue(one.grown(), floor_s)
        else:
            self.waiting.push(min(own_s, larger_s), one)

    def _with_pieces(self, one: Sizes) -> Sizes:
        return one

    def _most_stages(self, num_layers: int) -> int:
        return num_layers

    def _bound_s(self, one: _Waiting, floor_s: float = 0.0) -> float:
        """No step is faster, whose passes take at least `floor_s`."""
        known = one.graph_sizes
        share = one.sizes.microbatch_size / known.microbatch_size
        if one.bounded_by is not None:
            share *= self.coarse.growing_share(known)
        return max(floor_s, share * self.coarse.first_bound_s(one.choice, known, one.cluster))

    def _choices(
        self, one: Sizes, left: Replicas, num_layers: int, smallest: Sizes
    ) -> Iterator[tuple[Choice, bool]]:
        """All that these widths leave to decide, and whether stages may save as memory asks for; the graph of the `smallest`
        microbatches is there."""
        space = self.space
        kinds = schedules(left, num_layers, space, between_layers=self.between_layers)
        for schedule, num_chunks in dict.fromkeys(kinds):
            for recompute in self._recomputes(smallest):
                for zero in self._levels(left.dp * one.cp):
                    yield Choice(
                        left.dp, left.pp, one.microbatch_size, left.num_microbatches, schedule,
                        recompute="none" if recompute == "auto" else recompute,
                        zero=zero, reduce_dtype=space.reduce_dtype, tp=one.tp, sequence_parallel=one.sequence_parallel,
                        most_sharing=space.shard_size, host_optimizer=space.host_optimizer == "always",
                        shard_units=space.shard_units if (zero or 0) >= 2 else None, loss_pieces=one.loss_pieces,
                        cp=one.cp, ep=one.ep, num_chunks=num_chunks,
                    ), recompute == "auto"  # fmt: skip

    def _num_choices(self, one: _Untraced) -> int:
        """How many configurations of a width have been left out with it."""
        num_layers, found = self.coarse.costs(one.known).num_layers, 0
        for size in one.microbatch_sizes:
            sizes = replace(one.sizes, microbatch_size=size)
            for left in replicas(sizes, self.cluster, self.job, self.space, self._most_stages(num_layers)):
                found += sum(1 for _ in self._choices(sizes, left, num_layers, one.known))
        return found

    @cached_property
    def _orders(self) -> tuple[Cluster, ...]:
        return orders(self.cluster, self.job.computed_in)

    def _recomputes(self, one: Sizes) -> tuple[Recompute, ...]:
        if self.space.recompute is not None:
            return self.space.recompute
        partly = self.job.profile.selective is not None or bool(attention_scores(self.coarse.graph(one)))
        return ("none", "selective", "full") if partly else ("none", "full")

    def _levels(self, num_holders: int) -> tuple[int | None, ...]:
        if num_holders == 1:
            return (None,)
        if self.space.zero is not None:
            return self.space.zero
        return (2, 3) if self.job.profile.shard_units == "layers" else (1,)

    def _unbounded(self, tried: Iterable[Sizes]) -> list[Sizes]:
        """Those of which narrower ones do not tell what they take at the least."""
        found: list[Sizes] = []
        for one in tried:
            if self.coarse.narrower(one, found) is None:
                found.append(one)
        return found

    def _is_kept(self) -> bool:
        """Whether what has been traced so far is found again."""
        coarse = self.coarse
        if self.trace is not cached_trace:
            return False
        return not to_trace(self.request.model, list(map(coarse.traced, coarse.graphs)))

    # -- partition, memory, judge --------------------------------------------------------------------------------------

    def work_out(self) -> None:
        """Every configuration that waits, the most promising first, until no other can be among the best."""
        total = len(self.waiting)
        while self.waiting or self._may_promise():
            if self._may_promise() and not self.untraced[0].bound_s > self.waiting.least_s:
                self._gather_untraced()
                continue
            bound_s, one = self.waiting.pop()
            if bound_s >= self.longest_s:
                self._leave_out_slower(bound_s, one)
                self.waiting = _Queue()
            elif one.bounded_by is not None:
                if (missing := self._missing_in_smaller(one, one.bounded_by)) > 0:
                    self._lacks(one.choice, missing)
                    self._leave_out_larger(one)
                elif (traced := self._with_own_graph(one)) is not None:
                    self._queue(traced, one.passes_s)
            elif not one.is_split:
                split = self.split_up(one)
                if split is None:
                    self._leave_out_larger(one)
                else:
                    self.waiting.push(max(bound_s, split[0]), split[1])
                    self._grow(split[1])
            else:
                self.report(f"{max(total - len(self.waiting), 0)} of {total}: {one.choice}")
                if (plan := self.plan(one)) is not None:
                    self.add(plan, one)

    def _may_promise(self) -> bool:
        """Whether a width that has not been traced may be fast enough."""
        return bool(self.untraced) and self.untraced[0].bound_s < self.longest_s

    def _leave_out_slower(self, bound_s: float, first: _Waiting) -> None:
        """`first` and all that waits."""
        self.num_bounded += sum(1 + len(left.later) for left in (first, *self.waiting))
        if self.next_best is None or bound_s < self.next_best.seconds:
            self.next_best = Promised(str(first.choice), bound_s)

    def _with_own_graph(self, one: _Waiting) -> _Waiting | None:
        """`one` once its graph is traced; None, with the reason noted, where that cannot be."""
        self.report(f"widths of {one.sizes}")
        try:
            self.coarse.costs(one.sizes)
        except (InputError, TraceError, ContractError) as error:
            self.excluded.append(Excluded.of(one.choice, str(error)))
            return None
        return replace(one, bounded_by=None)

    def _missing_in_smaller(self, one: _Waiting, known: Sizes) -> int:
        """Bytes that the same lacks in smaller microbatches, whose graph is known: it does not need less in its own."""
        times = one.sizes.microbatch_size // known.microbatch_size
        smaller = replace(
            one.choice, microbatch_size=known.microbatch_size, num_microbatches=times * one.choice.num_microbatches,
            loss_pieces=known.loss_pieces,
        )  # fmt: skip
        return self._in_layers(smaller, known, one.cluster)[1]

    def _grow(self, split: _Waiting) -> None:
        """Queues a configuration that is split up in larger microbatches, whose samples take no less but for what every
        operator takes whatever its size."""
        if split.later:
            self._queue(split.grown(), self.coarse.growing_share(split.sizes) * split.passes_s)

    def _leave_out_larger(self, one: _Waiting) -> None:
        """What does not fit does not in larger microbatches."""
        while one.later:
            one = one.grown()
            self.excluded.append(Excluded.of(one.choice, "does not fit in smaller microbatches"))

    @property
    def longest_s(self) -> float:
        """Steps that take as long are of no use."""
        seconds = sorted(plan.predictions.step_seconds for plan in self.plans)
        keep = self.request.keep or KEPT
        return seconds[keep - 1] if len(seconds) >= keep else math.inf

    def add(self, plan: Plan, made_of: _Waiting) -> None:
        """One more plan."""
        plan = on_devices_of(plan, self.cluster, made_of.cluster)
        self.plans.append(plan)
        self.made_of[id(plan)] = made_of

    def split_up(self, one: _Waiting) -> tuple[float, _Waiting] | None:
        """With the layers of its stages, and a bound; None, with the reason noted, where memory is known not to suffice."""
        choice, missing = self._in_layers(one.choice, one.sizes, one.cluster)
        if missing > 0:
            self._lacks(choice, missing)
            return None
        bound_s = self.coarse.bound_s(choice, one.sizes, one.cluster)
        return bound_s, replace(one, choice=choice, is_split=True, passes_s=bound_s)

    def _in_layers(self, choice: Choice, sizes: Sizes, cluster: Cluster) -> tuple[Choice, int]:
        """With the layers of its stages, and the bytes that it lacks at the least."""
        choice = replace(choice, layers_per_stage=self.coarse.split(choice, sizes, cluster))
        return choice, self.coarse.missing_bytes(choice, sizes, cluster)

    def _lacks(self, choice: Choice, missing: int) -> None:
        reason = f"lacks {format_bytes(missing)} of memory a device, or more"
        self.excluded.append(Excluded.of(choice, reason, missing))
        if self.missing is None or missing < self.missing[0]:
            self.missing = missing, str(choice)

    def body(self, one: Sizes) -> RangeCosts:
        """The whole graph's costs."""
        body = body_costs(self.coarse.graph(one), self.cluster, self.job)
        self.without_rule |= body.few_costing.without_rule
        return body

    def plan(self, one: _Waiting) -> Plan | None:
        """The plan of a configuration; None, with the reason noted, where it does not fit or is too slow."""
        body = self.body(one.sizes)
        candidate = self._fitted(one, body)
        if candidate is None:
            self.num_bounded += 1
            return None
        missing, plan = candidate.excess_bytes, None
        if missing <= 0:
            plan = make_plan(candidate, body, self.request.model)
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
        return plan

    def _fitted(self, one: _Waiting, body: RangeCosts) -> Candidate | None:
        """With the layers that are fastest; where devices differ and one lacks memory, others take its layers as far as they
        can. None where a step is known to be too slow; time is looked at first, because memory takes longer."""
        choice = one.choice
        found = faster_candidate(body, choice, one.cluster, self.job, self.longest_s)
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
            counts = self.coarse.split(choice, one.sizes, one.cluster, most) or counts
            tried = make_candidate(body, replace(choice, layers_per_stage=counts), one.cluster, self.job)
            if tried.excess_bytes <= 0:
                return tried
        return found

    def improve(self) -> None:
        """What is better than the best of the plans and near to it."""

    def result(self) -> Found:
        """The best plans.

        Raises:
            PlanError: there is none.
        """
        if not self.plans:
            raise self._nothing_fits()
        self.num_bounded += sum(map(self._num_choices, self.untraced))
        plans = sorted(self.plans, key=lambda plan: plan.predictions.step_seconds)
        beyond = self.job.beyond(self.cluster.device) if self.cluster.is_homogeneous else None
        warnings = operator_warnings(self.without_rule) + ([] if beyond is None else [beyond])
        kept = self._ranked(plans)[: self.request.keep or KEPT]
        return Found(kept, self.excluded, warnings, self.num_bounded, self.next_best)

    def _ranked(self, plans: list[Plan]) -> list[Plan]:
        return plans

    def _nothing_fits(self) -> PlanError:
        if self.nearest is not None:
            return misses_memory(self.nearest, self.job)
        if self.missing is None:
            return PlanError(self.excluded[0].reason)
        missing, which = self.missing
        return PlanError(
            f"no configuration fits on cluster '{self.cluster.name}': {which} lacks {format_bytes(missing)} a device or "
            "more, the least of all; use more devices, shorter samples, or a higher memory limit"
        )


@dataclass
class _OwnSearch(_Search):
    """For our own runtime: cut at any operator, recomputing and offloading what memory asks for, in any schedule."""

    bodies: dict[Sizes, RangeCosts] = field(default_factory=dict)
    misjudged: dict[Choice, float] = field(default_factory=dict)
    """What plans take, as shares of what was expected of them, by what `_alike` makes of their choices."""
    whole_s: dict[Choice, float] = field(default_factory=dict)
    """What steps take with the loss evaluated at once."""
    slower: list[_Waiting] = field(default_factory=list)
    """Pipelines that were split up and promise less than the best, the most promising first."""
    piece_tokens: int = 0
    """Of the pieces that the loss is evaluated in from now on; 0: as `pieces_by_share` says."""
    has_pieces: bool = True
    """Whether the loss of the model can be evaluated in pieces at all, as far as is known."""
    without_room: dict[tuple[object, ...], list[tuple[Floats, float]]] = field(default_factory=dict)
    """By `_room`, what `_needs` says of configurations that lack memory whatever their stages recompute or offload."""
    lacking: tuple[int, _Waiting] | None = None
    """What lacks least by bounds, and by how much."""
    between_layers = False

    def __post_init__(self) -> None:
        super().__post_init__()
        space = self.space
        self.memory = Fitting(self.request.model, self.job, space.host_optimizer)
        self.memory.excluded = self.excluded
        self.usable_bytes = min(
            self.job.usable_bytes(group.device, self.cluster) for group in self.cluster.nodes
        )

    def _most_stages(self, num_layers: int) -> int:
        return min(self.cluster.num_devices, 4 * num_layers or self.cluster.num_devices)

    def gather_sizes(self, one: Sizes, sizes: Sequence[int]) -> None:
        """As there; ranks that cannot split the sequence, or evaluate the loss in pieces, do without where that is free."""
        try:
            super().gather_sizes(one, sizes)
        except (InputError, TraceError):
            if self._goes_without_pieces(replace(one, microbatch_size=sizes[0])):
                self.gather_sizes(one, sizes)
            elif one.sequence_parallel and self.space.sequence_parallel is None:
                self.gather_sizes(replace(one, sequence_parallel=False), sizes)
            else:
                raise

    def _goes_without_pieces(self, one: Sizes) -> bool:
        """Whether what cannot be traced may be with the loss whole, as it is from now on."""
        if self._with_pieces(one).loss_pieces == 1 or self.space.loss_pieces != "auto":
            return False
        self.has_pieces = False
        return True

    def _with_own_graph(self, one: _Waiting) -> _Waiting | None:
        one = replace(one, sizes=self._with_pieces(one.sizes))
        found = super()._with_own_graph(
            replace(one, choice=replace(one.choice, loss_pieces=one.sizes.loss_pieces))
        )
        if found is None and self._goes_without_pieces(one.sizes):
            return self._with_own_graph(one)
        return found

    def _missing_in_smaller(self, one: _Waiting, known: Sizes) -> int:
        return 0  # what is saved is given up where it does not fit

    def _bound_s(self, one: _Waiting, floor_s: float = 0.0) -> float:
        shared_s = super()._bound_s(one)
        choice = one.choice
        whole_s = shared_s * choice.pp / choice.num_microbatches
        # In front of a rank's first microbatch and behind its last one there are the stages before its own.
        fill_s = whole_s * (choice.pp - 1) / choice.num_stages if choice.schedule in _WHOLE_BACKWARDS else 0.0
        return self._with_network(one, max(floor_s, shared_s + fill_s))

    def _with_network(self, one: _Waiting, passes_s: float) -> float:
        """A step whose passes take so long."""
        known = one.graph_sizes
        sharding_s = self.coarse.sharding_s(one.choice, known, one.cluster)
        return max(passes_s, sharding_s) + self.coarse.after_s(one.choice, known, one.cluster)

    def _recomputes(self, one: Sizes) -> tuple[Recompute, ...]:
        asked = self.space.recompute or (None,)
        return tuple(recompute_of(way, self.coarse.graph(one)) for way in asked)

    def _levels(self, num_holders: int) -> tuple[int | None, ...]:
        if num_holders == 1 or self.space.zero is not None:
            return super()._levels(num_holders)
        # On processors that compute, sums of gradients overlap with nothing.
        levels = (None if self.cluster.kind == "cpu" else 0, 1, 2, 3)
        return levels if self.job.kept.is_elementwise else levels[:1]

    @property
    def longest_s(self) -> float:
        """Once there are enough plans, what is not faster than the best of them is left out."""
        best = self._best()
        is_enough = best is not None and len(self.plans) >= (self.request.keep or 1)
        return best.predictions.step_seconds if best is not None and is_enough else math.inf

    def _leave_out_slower(self, bound_s: float, first: _Waiting) -> None:
        super()._leave_out_slower(bound_s, first)
        left = sorted([(bound_s, -1, first), *self.waiting.entries])
        near_s = (1 + MOST_FILLED) * self.longest_s
        self.slower += [one for at, _, one in left if one.is_split and one.choice.pp > 1 and at < near_s]

    def split_up(self, one: _Waiting) -> tuple[float, _Waiting] | None:
        """With its fastest cuts, and what it takes with these at the least, as far as like ones tell; None, with the reason
        noted, where it cannot fit."""
        choice = one.choice
        missing = self.coarse.missing_anywhere(choice, one.sizes, one.cluster)
        if missing > 0:
            self._lacks(choice, missing, one)
            self._try_on_host(one)
            return None
        if one.saves and self._needs_more_than_what_lacks(one):
            self._lacks_whatever(one, missing)
            return None
        body = self.body(one.sizes)
        where = one.cluster
        try:
            if has_equal_nodes(where):
                where = cluster_for(choice, body, where, self.job)
            cuts, seconds = fastest_partition(body, choice, where)
            busy_s, offload = choice.num_microbatches * float(body.seconds[-1]) / choice.pp, False
            if one.saves:
                within = self._within_memory(choice, body, where, cuts)
                if within is None and self.space.offload:  # which is rarely faster than to recompute
                    within = self._within_memory(choice, body, where, cuts, offload=True)
                    offload = True
                if within is None:
                    needs = self._needs(choice)
                    self.without_room.setdefault(_room(one, len(needs[0])), []).append(needs)
                    self._lacks_whatever(one, missing)
                    return None
                seconds, busy_s = max(seconds, within.seconds), max(busy_s, within.busy_s)
            partitioned = Partitioned(choice, body, where, cuts, one.saves, offload)
            if not one.saves and not self.memory.has_partition(partitioned):
                self._try_on_host(one)
                return None
        except PlanError as error:  # too few legal cuts
            self.excluded.append(Excluded.of(choice, str(error)))
            return None
        # Ranges leave out what splitting adds, such as summing up gradients of weights.
        more = max(1.0, self.coarse.costs(one.sizes).total_seconds / float(body.seconds[-1]))
        found = replace(
            one, cluster=where, partitioned=partitioned, is_split=True, passes_s=more * seconds, busy_s=more * busy_s
        )  # fmt: skip
        seconds = found.passes_s
        return self._with_network(found, seconds) * self._judgement(choice), found

    def _judgement(self, choice: Choice) -> float:
        """What a plan takes at the least, as a share of what coarse costs say: as the same one turned out, or nearly as the
        same one with its loss at once did."""
        whole = self.misjudged.get(replace(_alike(choice), loss_pieces=1), 1 - _ROUGH + _ALIKE)
        return self.misjudged.get(_alike(choice), whole - _ALIKE)

    def _lacks_whatever(self, one: _Waiting, missing: int) -> None:
        self.memory.exclude(one.choice, "lacks memory whatever its stages recompute or offload")
        if self.lacking is None or missing < self.lacking[0]:
            self.lacking = missing, one
        self._try_on_host(one)

    def _needs(self, choice: Choice) -> tuple[Floats, float]:
        """Sets of saved values that every stage has in flight, and the part of its state that a rank keeps."""
        return np.array(in_flight(make_program(choice)), float), choice.state_share(self.job.precision)

    def _needs_more_than_what_lacks(self, one: _Waiting) -> bool:
        """Whether something that needs no more, on as many stages of the same ranks, has lacked memory whatever it saves."""
        if not self.without_room:
            return False
        counts, share = self._needs(one.choice)
        known = self.without_room.get(_room(one, len(counts)), ())
        return any(share >= least and (counts >= fewest).all() for fewest, least in known)

    def _within_memory(
        self,
        choice: Choice,
        body: RangeCosts,
        cluster: Cluster,
        cuts: tuple[int, ...],
        *,
        offload: bool = False,
    ) -> Within | None:
        program = make_program(choice)
        placed = program.placement
        own = bodies_of(body, cluster, choice.pp, choice.num_holders * choice.tp)
        bodies = [own[rank] for rank in placed.rank_of_stage]
        capacities = [
            allocatable_bytes(self.job.usable_bytes(each.device, cluster), each.device)
            / len(placed.stages_of(rank))
            for each, rank in zip(bodies, placed.rank_of_stage, strict=True)
        ]
        width = choice.num_holders * choice.tp
        firsts = [rank * width for rank in placed.rank_of_stage]
        return partition_within(
            bodies, program, cuts, capacities, in_flight(program),
            lambda source, target, size: cluster.blocks_seconds(size, firsts[source], firsts[target], width),
            state_share=choice.state_share(self.job.precision), offload=offload,
        )  # fmt: skip

    def _lacks(self, choice: Choice, missing: int, one: _Waiting | None = None) -> None:
        super()._lacks(choice, missing)
        if one is not None and (self.lacking is None or missing < self.lacking[0]):
            self.lacking = missing, one

    def _nearest(self) -> Partitioned | None:
        """What lacks least of all that was given up before it was cut."""
        if self.lacking is None:
            return None
        one = self.lacking[1]
        body = self.body(one.sizes)
        try:
            cuts, _ = fastest_partition(body, one.choice, one.cluster)
        except PlanError:  # too few legal cuts
            return None
        return Partitioned(one.choice, body, one.cluster, cuts, one.saves)

    def _try_on_host(self, one: _Waiting) -> None:
        self.memory.try_on_host(one.choice, one.cluster)
        self._requeue(one)

    def _requeue(self, one: _Waiting) -> None:
        """What was found worth trying with the optimizer on the host, of the sizes of `one`."""
        while self.memory.on_host:
            self._queue(
                _Waiting(self.memory.on_host.pop(0), one.sizes, one.cluster, one.saves, later=one.later)
            )

    def plan(self, one: _Waiting) -> Plan | None:
        """As there; what saves is worked out only where it could be the best."""
        assert one.partitioned is not None
        best_s = min((plan.predictions.step_seconds for plan in self.plans), default=math.inf)
        plan = self.memory.plan(one.partitioned, one.saves, best_s, self.longest_s)
        if plan is not None:
            seconds, expected_s = plan.predictions.step_seconds, self._with_network(one, one.passes_s)
            self.misjudged.setdefault(_alike(one.choice), seconds / expected_s)
            whole_s = self.whole_s.setdefault(replace(one.choice, loss_pieces=1), seconds)
            if one.choice.loss_pieces > 1 and whole_s < seconds:  # pieces do not help here
                self.waiting.keep(lambda other: other.choice.loss_pieces == 1 or _shape(other) != _shape(one))
        elif self._lacks_more_than_state(one):
            self.memory.on_host.clear()
        self._requeue(one)
        return plan

    def _lacks_more_than_state(self, one: _Waiting) -> bool:
        """Whether `one`, the last that was left out, would not fit without the state of the optimizer."""
        missing = self.excluded[-1].missing_bytes if self.excluded else None
        shares = (
            each.state_share(self.job.precision)
            for each in (one.choice, replace(one.choice, host_optimizer=True))
        )
        kept, there = shares
        return (
            missing is not None
            and missing > (kept - there) * self.body(one.sizes).state_bytes[-1] / one.choice.pp
        )

    def body(self, one: Sizes) -> RangeCosts:
        if one not in self.bodies:
            self.bodies[one] = super().body(one)
        return self.bodies[one]

    # -- improve -----------------------------------------------------------------------------------------------------

    def improve(self) -> None:
        """The loss in pieces, whole sequences, a longer look at what is recomputed, and the joint search."""
        self._in_pieces()
        self._with_whole_sequences()
        if not self.plans:
            self.report("making room")
            last = self.memory.last_resort(self._nearest())
            self.plans += [] if last is None else [last]
        self._refine()
        if JOINT in (self.space.schedules or ()):
            self._search_jointly()

    def _in_pieces(self) -> None:
        """What is short of the memory that logits take, once more with the loss in pieces."""
        for tokens in PIECE_TOKENS if self.space.loss_pieces == "auto" else ():
            if self.piece_tokens and self.plans:
                break
            shapes = short_of_memory(self.plans, self.excluded, self._logits_bytes, self.usable_bytes)
            self.piece_tokens = tokens
            for shape in shapes:
                self._try_sizes(
                    [
                        replace(one, loss_pieces=1)
                        for one in self.coarse.graphs
                        if (one.tp, one.microbatch_size) == (shape.tp, shape.microbatch_size)
                    ],
                    set(shape.widths),
                )

    def _with_whole_sequences(self) -> None:
        """The sizes of the best, where its ranks split the sequence."""
        best = self._best()
        if best is not None and best.sequence_parallel and self.space.sequence_parallel is None:
            own = self.made_of[id(best)].sizes
            self._try_sizes([replace(own, sequence_parallel=False)], {(best.dp, best.pp)})

    def _try_sizes(self, tried: Iterable[Sizes], shapes: set[tuple[int, int]]) -> None:
        """More sizes, with those numbers of replicas and ranks of a pipeline alone."""
        for one in dict.fromkeys(tried):
            if self._with_pieces(one) not in self.coarse.graphs:
                try:
                    super().gather_sizes(one, [one.microbatch_size])
                except (InputError, TraceError) as error:
                    self.excluded.append(Excluded(str(error), 1, 1, one.microbatch_size, tp=one.tp))
        self.waiting.keep(lambda one: (one.choice.dp, one.choice.pp) in shapes)
        self.work_out()

    def _best(self) -> Plan | None:
        return min(self.plans, key=lambda plan: plan.predictions.step_seconds, default=None)

    def _refine(self) -> None:
        """Looks longer for what the best plan recomputes, and whether offloading is faster, where it saves by much."""
        best = self._best()
        one = self.made_of.get(id(best))
        if best is None or one is None or (at := one.partitioned) is None:
            return
        if _saving_share(best) < _WORTH_REFINING:
            return
        self.report("looking for what is best recomputed")
        plans = [best]
        if self.memory.left_free.get(id(best)) and self._unused_share(best) > _SLACK:
            plans += filter(None, [self.memory.afresh(at, best.predictions.step_seconds)])
        left_free = self.memory.left_free.get(id(plans[-1]), 0)
        if _may_be_refined(plans[-1]):
            plans += filter(None, [self.memory.refined(at)])
        if self.space.offload and not at.offload and self.cluster.kind != "cpu":
            below_s = min(plan.predictions.step_seconds for plan in plans)
            plans += filter(None, [self.memory.afresh(replace(at, offload=True), below_s, left_free)])
        plan = min(plans, key=lambda plan: plan.predictions.step_seconds)
        if plan is not best:
            self.plans.remove(best)
            self.add(plan, one)

    def _unused_share(self, plan: Plan) -> float:
        """Of memory, what its fullest rank does not reserve: too much was left free for what the allocator loses."""
        fullest = max(rank.reserved_peak_bytes for rank in plan.predictions.ranks)
        return 1 - fullest / self.usable_bytes

    def _search_jointly(self) -> None:
        """Adds plans of the joint search that are faster than the best of the families.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was found until then is added.
        """
        stop = threading.Event()
        self._add_finalists()
        known = [plan for plan in self.plans if id(plan) in self.made_of]
        for plan in joint_plans(
            known, lambda plan: self._joint_start(self.made_of[id(plan)]), self.job, self.request.model,
            offload=self.space.offload, host_optimizer=self.space.host_optimizer, report=self.report, stop=stop,
        ):  # fmt: skip
            self.plans.append(plan)
        if stop.is_set():
            raise KeyboardInterrupt

    def _add_finalists(self) -> None:
        """Plans of pipelines that are slower for their bubbles alone, which the joint search may fill."""
        if (best := self._best()) is None:
            return
        known = [plan for plan in self.plans if id(plan) in self.made_of]
        shapes = {_shape(self.made_of[id(plan)]) for plan in known}
        least_s: dict[Choice, float] = {}
        for one in self.slower:
            least_s[_shape(one)] = min(
                least_s.get(_shape(one), math.inf), self._with_network(one, one.busy_s)
            )
        for one in self.slower:
            if len(finalists(self.plans)) >= NUM_FINALISTS:
                break
            if _shape(one) in shapes or least_s[_shape(one)] >= best.predictions.step_seconds:
                continue
            shapes.add(_shape(one))
            if (
                one.partitioned is not None
                and (plan := self.memory.plan(one.partitioned, one.saves)) is not None
            ):
                self.add(plan, one)

    def _joint_start(self, one: _Waiting) -> tuple[Choice, RangeCosts, Cluster, bool]:
        return one.choice, self.body(one.sizes), one.cluster, one.saves

    # -- pieces of the loss --------------------------------------------------------------------------------------------

    def _with_pieces(self, one: Sizes) -> Sizes:
        """In as many pieces as the loss is evaluated from now on."""
        asked = self.space.loss_pieces
        return replace(one, loss_pieces=self._pieces(one) if asked == "auto" else asked)

    def _pieces(self, one: Sizes) -> int:
        num_tokens = one.microbatch_size * self.job.sequence_length
        logits = self._logits_bytes(one.microbatch_size, one.tp)
        if not self.has_pieces or not logits:
            return 1
        by_share = pieces_by_share(logits, num_tokens, self.usable_bytes)
        of_tokens = pieces_of_tokens(self.piece_tokens, num_tokens) if self.piece_tokens else 1
        return max(by_share, of_tokens)

    def _logits_bytes(self, size: int, tp: int) -> int:
        return logits_bytes(self.request.model, size * self.job.sequence_length, tp)

    def _ranked(self, plans: list[Plan]) -> list[Plan]:
        return ranked(plans)

    def _nothing_fits(self) -> PlanError:
        return self.memory.nothing_fits() or super()._nothing_fits()


def _alike(choice: Choice) -> Choice:
    """The same wherever the optimizer is, which takes little time."""
    return replace(choice, host_optimizer=False)


def _room(one: _Waiting, num_stages: int) -> tuple[object, ...]:
    """The same for all whose stages, so many, have the same operators to keep the values of, and as much memory for them."""
    return one.sizes, one.choice.pp, num_stages, one.choice.host_optimizer, one.cluster


def _shape(one: _Waiting) -> Choice:
    """The same for all that differ by the order of passes, what is shared out and how the loss is evaluated."""
    return replace(
        _alike(one.choice),
        schedule="",
        num_chunks=None,
        zero=None,
        loss_pieces=1,
        recompute="none" if one.choice.recompute == "full" else one.choice.recompute,
    )


def _saving_share(plan: Plan) -> float:
    """Of the time that stages are busy, what they spend on making values again and on waiting for the host."""
    stages = plan.predictions.stages
    saving_s = sum(stage.recompute_seconds + stage.waiting_seconds for stage in stages)
    busy_s = sum(one.forward_seconds + one.input_grad_seconds + one.weight_grad_seconds for one in stages)
    return saving_s / busy_s


def _may_be_refined(plan: Plan) -> bool:
    """Whether a stage that recomputes is small enough to look longer."""
    return any(
        stage.recompute_seconds and stage.stop - stage.start <= _REFINED for stage in plan.predictions.stages
    )
