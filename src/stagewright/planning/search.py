"""The search: every pipeline width, microbatch and schedule on a cluster, best first, within memory."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.stages import BodyCosts
from stagewright.estimation.state import Precision
from stagewright.graph import OperatorGraph
from stagewright.planning.advice import misses_memory
from stagewright.planning.candidate import (
    Candidate,
    Choice,
    fastest_partition,
    least_saving,
    make_candidate,
    make_plan,
    make_program,
    saved_counts,
    with_cuts,
    within_memory,
)
from stagewright.planning.estimate import graph_of
from stagewright.planning.finalists import JOINT, joint_plans
from stagewright.planning.host_optimizer import (
    HostOptimizer,
    checked,
    host_excess_bytes,
    may_use_host,
    steps_once,
    with_room_used,
)
from stagewright.planning.job import Job
from stagewright.planning.lengths import best_over_lengths
from stagewright.planning.mixed import ONE_STAGE_EACH, plan_mixed
from stagewright.planning.partition import MemoryBudget, partition
from stagewright.planning.pipeline import costing
from stagewright.planning.plan import Plan, shared_layers
from stagewright.planning.predict import lower_bound_seconds, run_timeline
from stagewright.planning.ranking import ranked
from stagewright.planning.widths import microbatch_sizes, tensor_widths_of, widths_of
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes, format_seconds

Trace = Callable[..., OperatorGraph]
Recompute = Literal["auto", "none", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

SCHEDULES = ("1f1b", "gpipe", JOINT)
"""Tried unless others are named."""

_MOST_FRAGMENTS = 0.15
"""A configuration that loses more than this of its memory to fragmentation is no plan."""

_HOPELESS = 1.5
"""A configuration this many times slower than the best step found is not worked out."""


@dataclass(frozen=True)
class Excluded:
    """A configuration that is no plan, and why; `missing_bytes` where it lacks memory."""

    reason: str
    dp: int
    pp: int
    microbatch_size: int | None = None
    schedule: str | None = None
    missing_bytes: int | None = None
    tp: int = 1


@dataclass(frozen=True)
class Found:
    """Plans, best first, and what was left out."""

    plans: list[Plan]
    excluded: list[Excluded]
    warnings: list[str] = field(default_factory=list)


def plan(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    report: Callable[[str], None] = lambda stage: None,
    schedules: Sequence[str] = SCHEDULES,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = 1,
    sequence_parallel: bool = False,
    microbatch: int | None = None,
    recompute: Recompute = "auto",
    offload: bool = True,
    zero: int | None = None,
    reduce_dtype: Literal["fp32", "bf16"] | None = None,
    shard_size: int | None = None,
    host_optimizer: HostOptimizer = "auto",
    trace: Trace = cached_trace,
    interruptible: bool = False,
) -> Found:
    """The best plans of `model` for `cluster` and `job`.

    Args:
        report: told what the search is doing.
        schedules: names of schedule families to try; with "joint" among them, the joint search improves the best.
        pp, dp, microbatch: fix a width or the samples of a microbatch; by default all are tried.
        tp: ranks that share every layer; None tries all widths within a node that divide the model.
        sequence_parallel: whether those ranks split the sequence between the layers' products.
        recompute: whether stages recompute what they save: ``none``, ``full``, or ``auto``, as much as memory asks for.
        offload: with ``auto``, whether stages may move what they save to the host and back.
        zero: what replicas share out, 0 to 3, gradients summed as stages finish; by default they are summed at the end of
            the batch and nothing is shared out.
        reduce_dtype: type in which gradients are summed over replicas; default the type they are added up in.
        shard_size: at most so many replicas, neighbours, share out among each other, others hold copies; default all.
        host_optimizer: whether the optimizer's state, and the step on it, are on the host's processors: ``never``,
            ``always``, or ``auto``, on ranks that lack memory, where that is faster than what else makes room.
        trace: makes operator graphs; takes the arguments of `stagewright.tracing.cache.trace`.
        interruptible: whether Ctrl-C ends the search with the plans found so far, once there is one; a warning says so.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        TraceError: the model cannot be traced.
        PlanError: no configuration fits; says by how much the best misses and what would fit.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model)
    host_optimizer = checked(host_optimizer, cluster)
    if not cluster.is_homogeneous:
        simple = [name for name in schedules if name in ONE_STAGE_EACH] or ["1f1b"]
        if tp not in (None, 1) or zero:
            raise InputError(
                f"cluster '{cluster.name}' mixes devices: plans for it have no shared layers and no ZeRO; leave out --tp "
                "and --zero, or name a part of one kind"
            )
        plans = plan_mixed(
            reference, cluster, job, schedules=simple, pp=pp, dp=dp, microbatch=microbatch, recompute=recompute,
            offload=offload, report=report, trace=trace,
        )  # fmt: skip
        return over_lengths(Found(plans, []), cluster, report, trace)
    search = _Search(
        reference, cluster, job, report, tuple(schedules), trace, recompute, offload, zero, reduce_dtype,
        shard_size, host_optimizer,
    )  # fmt: skip
    try:
        search.gather_all(tensor_widths_of(cluster, tp), sequence_parallel, microbatch, (pp, dp, tp))
        search.work_out()
        if JOINT in schedules and recompute != "full":
            search.search_jointly()
    except KeyboardInterrupt:
        if not interruptible or not search.plans:
            raise
        search.warnings.append(
            "interrupted: these are the best plans so far, not all configurations were tried"
        )
    return over_lengths(search.result(), cluster, report, trace)


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
    """A choice to work out; `cuts` of its fastest partition, once they are known."""

    choice: Choice
    body: BodyCosts
    cuts: tuple[int, ...] | None = None


class _Queue:
    """What waits, by a bound on its seconds; of equal bounds, what came first."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, _Waiting]] = []
        self.count = itertools.count()

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, bound: float, one: _Waiting) -> None:
        heapq.heappush(self.entries, (bound, next(self.count), one))

    def pop(self) -> tuple[float, _Waiting]:
        bound, _, one = heapq.heappop(self.entries)
        return bound, one


class _Search:
    def __init__(
        self,
        reference: ModelReference,
        cluster: Cluster,
        job: Job,
        report: Callable[[str], None],
        schedules: tuple[str, ...],
        trace: Trace,
        recompute: Recompute,
        offload: bool,
        zero: int | None,
        reduce_dtype: Literal["fp32", "bf16"] | None,
        shard_size: int | None,
        host_optimizer: HostOptimizer,
    ) -> None:
        self.shard_size = shard_size
        self.host_optimizer = host_optimizer
        self.zero = zero
        self.reduce_dtype: Literal["fp32", "bf16"] | None = reduce_dtype
        self.recompute = recompute
        self.offload = offload
        self.reference = reference
        self.cluster = cluster
        self.job = job
        self.report = report
        self.schedules = tuple(name for name in schedules if name != JOINT) or ("1f1b",)
        self.trace = trace
        self.tp, self.sequence_parallel = 1, False
        self.plans: list[Plan] = []
        self.excluded: list[Excluded] = []
        self.warnings: list[str] = []
        self.waiting = _Queue()
        self.misses: list[Candidate] = []
        self.too_many_stages: list[PlanError] = []
        self.latest: tuple[int, BodyCosts] | None = None
        self.bodies: dict[tuple[int, int], BodyCosts] = {}
        self.without_rule: set[str] = set()
        self.tried_on_host: set[Choice] = set()
        self.roughly_missed: list[tuple[int, Choice]] = []

    def share_layers(self, num_ranks: int, sequence_parallel: bool) -> None:
        """From now on, configurations in which so many ranks share every layer."""
        self.tp, self.sequence_parallel = num_ranks, sequence_parallel
        self.latest = None

    def choices(self, size: int, width: tuple[int, int]) -> Iterator[Choice]:
        """What to try with microbatches of `size` samples at one (dp, pp); nothing if they do not divide."""
        dp, pp = width
        count, rest = divmod(self.job.global_batch // dp, size)
        if rest:
            return
        for schedule in self.schedules if pp > 1 else self.schedules[:1]:
            full = self.recompute == "full" and pp > 1
            yield Choice(
                dp,
                pp,
                size,
                count,
                schedule,
                full,
                self.zero,
                self.reduce_dtype,
                self.tp,
                self.sequence_parallel,
                self.shard_size,
                self.host_optimizer == "always",
            )

    def gather_all(
        self,
        tensor_widths: Sequence[int],
        sequence_parallel: bool,
        microbatch: int | None,
        asked: tuple[int | None, int | None, int | None],
    ) -> None:
        """Trace what is needed and queue every configuration; `asked` are the fixed pp, dp and tp."""
        pp, dp, tp = asked
        for shared in tensor_widths:
            self.share_layers(shared, sequence_parallel and shared > 1)
            try:
                widths = widths_of(self.cluster, self.job, pp, dp, shared)
                for size in microbatch_sizes(widths, self.job, microbatch):
                    choices = [choice for width in widths for choice in self.choices(size, width)]
                    if not self.gather(size, choices):
                        break
            except InputError as error:
                if tp is not None or shared == 1:
                    raise
                self.excluded.append(Excluded(str(error), dp or 1, pp or 1, tp=shared))

    def gather(self, size: int, choices: list[Choice]) -> bool:
        """Every choice with microbatches of `size` samples that may fit waits to be worked out; false if none does."""
        if self.latest is not None:
            known, body = self.latest
            choices = self._fitting(choices, body, size / known)
        if not choices:
            return False
        body = self.bodies[size, self.tp] = self._trace(size, self.tp)
        choices = self._fitting(choices, body, 1.0)
        for choice in choices:
            self._wait(choice, body)
        self.without_rule |= body.costing.without_rule
        self.latest = size, body
        return bool(choices)

    def _wait(self, choice: Choice, body: BodyCosts) -> None:
        shards = choice.shard_size or choice.dp if choice.level else 1
        bound = lower_bound_seconds(body, choice.num_microbatches, choice.pp, self.job, shards)
        self.waiting.push(bound, _Waiting(choice, body))

    def work_out(self) -> None:
        """Every choice that waits, the most promising first, so that what saving costs is worked out for few."""
        while self.waiting:
            bound, one = self.waiting.pop()
            best = self._best_seconds()
            if bound > _HOPELESS * best:
                about = "at least" if one.cuts is None else "about"
                self._exclude(one.choice, f"takes {about} {format_seconds(bound)} a step")
            elif one.cuts is None:
                cuts, seconds = fastest_partition(one.body, one.choice, self.cluster)
                self.waiting.push(max(bound, seconds), replace(one, cuts=cuts))
            else:
                self.report(str(one.choice))
                saves = self.recompute == "auto" and bound < best
                self._work_out_within_memory(one.choice, one.body, one.cuts, saves)

    def search_jointly(self) -> None:
        """Adds plans of the joint search that are faster than the best of the families.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was found until then is added.
        """
        stop = threading.Event()
        for found in joint_plans(
            tuple(self.plans), lambda plan: self.bodies[plan.microbatch_size, plan.tp], self.cluster, self.job,
            self.reference, zero=self.zero, saves=self.recompute == "auto", offload=self.offload, report=self.report,
            stop=stop,
        ):  # fmt: skip
            self.plans.append(found)
        if stop.is_set():
            raise KeyboardInterrupt

    def _best_seconds(self) -> float:
        return min((found.predictions.step_seconds for found in self.plans), default=math.inf)

    def _trace(self, size: int, tp: int) -> BodyCosts:
        self.report(f"tracing microbatches of {size}" + (f" for tp {tp}" if tp > 1 else ""))
        traced = self.job.traced(self.cluster.device.kind) | shared_layers(tp, self.sequence_parallel)
        graph = self.trace(self.reference, size, report=self.report, **traced)
        return BodyCosts(graph, costing(graph, self.cluster, self.job))

    def _fitting(self, choices: Iterable[Choice], body: BodyCosts, scale: float) -> list[Choice]:
        """Of each choice, itself if it may fit, or else with the host's memory if that may."""
        found = []
        for choice in choices:
            ways = [choice, *self._with_host(choice)]
            found += [way for way in ways if self._may_fit(way, body, scale)][:1]
        return found

    def _with_host(self, choice: Choice) -> list[Choice]:
        """`choice` with the optimizer on the host, if that is one more way to try."""
        allowed = self.host_optimizer == "auto" and not choice.host_optimizer and may_use_host(self.cluster)
        return [replace(choice, host_optimizer=True)] if allowed and steps_once(choice) else []

    def _may_fit(self, choice: Choice, body: BodyCosts, scale: float) -> bool:
        """Whether state and saved values alone, the latter `scale` times those of `body`, fit in some partition; where
        saved values may be given up, those of one microbatch."""
        saved = saved_counts(make_program(choice))
        if self.recompute == "auto":
            saved = [min(count, 1) for count in saved]
        return self._partition_fits(choice, body, [count * scale for count in saved])

    def _partition_fits(
        self, choice: Choice, body: BodyCosts, counts: Sequence[float], kept: bool = False
    ) -> bool:
        """Whether some partition keeps the state and so many sets of saved values per stage, which are all there are if
        `kept`; if none does, why is noted."""
        limit = self.job.usable_bytes(self.cluster.device)
        share = choice.state_share(Precision.of(self.job.torch_name))
        budget = MemoryBudget([float(limit)] * len(counts), counts, share)
        try:
            if partition(body, len(counts), 0.0, budget) is not None:
                return True
        except PlanError as error:
            self.too_many_stages.append(error)
            self._exclude(choice, str(error))
            return False
        least = _least_bytes(body, counts, share)
        self.roughly_missed.append((least, choice))
        if least > limit:
            which = (
                ", and cannot be the fastest if it gives any up" if self.recompute == "auto" and kept else ""
            )
            reason = f"needs {format_bytes(least)} a device or more, of {format_bytes(limit)}{which}"
            self._exclude(choice, reason, least - limit)
        else:
            self._exclude(choice, f"no partition keeps every device within {format_bytes(limit)}")
        return False

    def _work_out_within_memory(
        self, choice: Choice, body: BodyCosts, start: Sequence[int], saves: bool
    ) -> None:
        """Adds the plan of `choice` that leaves room for what the allocator loses, or why there is none.

        `saves`: whether it may recompute or offload, which takes long to work out and only pays for what could be fastest.
        """
        counts = saved_counts(make_program(choice))
        if not saves and not self._partition_fits(choice, body, counts, kept=True):
            self._try_host(choice, body)
            return
        limit = self.job.usable_bytes(self.cluster.device)
        fastest = with_cuts(body, choice, start, self.cluster, self.job)
        lost = 0  # to fragmentation, which only the replay of the allocator shows
        while True:
            within = self.job.model_copy(update={"memory_limit": limit - lost}) if lost else self.job
            candidate = self._best_that_fits(fastest.for_job(within), body, saves)
            if candidate.excess_bytes > 0:
                self.misses.append(candidate)
                missing = candidate.excess_bytes
                self._exclude(choice, f"lacks {format_bytes(missing)} of memory a device", missing)
                return
            if (missing := host_excess_bytes(candidate.line)) > 0:
                self._exclude(choice, f"lacks {format_bytes(missing)} of memory on a host", missing)
                return
            used = (
                [with_room_used(candidate)] if choice.host_optimizer and self.host_optimizer == "auto" else []
            )
            for one in (*used, candidate):
                found = make_plan(one, body, self.reference)
                missing = max(rank.reserved_peak_bytes for rank in found.predictions.ranks) - limit
                if missing <= 0:
                    self.plans.append(found.model_copy(update={"job": self.job}))
                    return
            lost += max(missing, limit // 25)
            if lost > _MOST_FRAGMENTS * limit:
                self.misses.append(replace(candidate, excess_bytes=missing))
                reason = f"lacks {format_bytes(missing)} of memory a device, lost to fragmentation"
                self._exclude(choice, reason, missing)
                return

    def _best_that_fits(self, fastest: Candidate, body: BodyCosts, saves: bool) -> Candidate:
        """The fastest partition, if it fits; else one within memory or one that saves, whichever is faster."""
        if fastest.excess_bytes <= 0:
            return fastest
        self._try_host(fastest.choice, body)
        kept = within_memory(fastest, body)
        if not saves:
            return kept
        saving = least_saving([fastest, kept], body, offload=self.offload, below_s=self._best_seconds())
        fitting = [one for one in (kept, saving) if one is not None and one.excess_bytes <= 0]
        return min(fitting, key=lambda one: run_timeline(one.line).makespan_s, default=kept)

    def _try_host(self, choice: Choice, body: BodyCosts) -> None:
        """What `choice`, which lacks memory, takes with the optimizer on the host is worked out too, once."""
        for way in self._with_host(choice):
            if way not in self.tried_on_host:
                self.tried_on_host.add(way)
                self._wait(way, body)

    def _exclude(self, choice: Choice, reason: str, missing: int | None = None) -> None:
        self.excluded.append(
            Excluded(
                reason, choice.dp, choice.pp, choice.microbatch_size, choice.schedule, missing, choice.tp
            )
        )

    def result(self) -> Found:
        if not self.plans:
            raise self._nothing_fits()
        warnings = [
            f"operator {name} has no rule: its time is that of its bytes"
            for name in sorted(self.without_rule)
        ]
        return Found(ranked(self.plans), self.excluded, [*self.warnings, *warnings])

    def _nothing_fits(self) -> PlanError:
        if not self.misses and self.roughly_missed:
            _, choice = min(self.roughly_missed, key=lambda miss: miss[0])
            self.misses.append(
                make_candidate(self._trace(choice.microbatch_size, choice.tp), choice, self.cluster, self.job)
            )
        if self.misses:
            return misses_memory(min(self.misses, key=lambda miss: miss.excess_bytes), self.job)
        return self.too_many_stages[0]


def _least_bytes(body: BodyCosts, counts: Sequence[float], state_share: float) -> int:
    """Bytes of the fullest rank if what it keeps of the state, and saved values, could be shared out evenly."""
    saved = float(body.saved_bytes[-1]) * float(np.mean(counts))
    return round((state_share * float(body.state_bytes[-1]) + saved) / len(counts))
