"""The search: every pipeline width, microbatch and schedule on a cluster, best first, within memory."""

from __future__ import annotations

import math
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
)
from stagewright.planning.job import Job
from stagewright.planning.partition import MemoryBudget, partition
from stagewright.planning.plan import Plan, shared_layers
from stagewright.planning.predict import costing, lower_bound_seconds, run_timeline
from stagewright.planning.ranking import ranked
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes, format_seconds

Trace = Callable[..., OperatorGraph]
Recompute = Literal["auto", "none", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

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
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = 1,
    sequence_parallel: bool = False,
    microbatch: int | None = None,
    recompute: Recompute = "auto",
    offload: bool = True,
    zero: int | None = None,
    reduce_dtype: Literal["fp32", "bf16"] | None = None,
    trace: Trace = cached_trace,
) -> Found:
    """The best plans of `model` for `cluster` and `job`.

    Args:
        report: told what the search is doing.
        schedules: names of schedule families to try.
        pp, dp, microbatch: fix a width or the samples of a microbatch; by default all are tried.
        tp: ranks that share every layer; None tries all widths within a node that divide the model.
        sequence_parallel: whether those ranks split the sequence between the layers' products.
        recompute: whether stages recompute what they save: ``none``, ``full``, or ``auto``, as much as memory asks for.
        offload: with ``auto``, whether stages may move what they save to the host and back.
        zero: what replicas share out, 0 to 3, gradients summed as stages finish; by default they are summed at the end of
            the batch and nothing is shared out.
        reduce_dtype: type in which gradients are summed over replicas; default the type they are added up in.
        trace: makes operator graphs; takes the arguments of `stagewright.tracing.cache.trace`.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        TraceError: the model cannot be traced.
        PlanError: no configuration fits; says by how much the best misses and what would fit.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model)
    search = _Search(
        reference, cluster, job, report, tuple(schedules), trace, recompute, offload, zero, reduce_dtype
    )
    for shared in tensor_widths_of(cluster, tp):
        search.share_layers(shared, sequence_parallel and shared > 1)
        try:
            widths = widths_of(cluster, job, pp, dp, shared)
            for size in _microbatch_sizes(widths, job, microbatch):
                choices = [choice for width in widths for choice in search.choices(size, width)]
                if not search.work_out(size, choices):
                    break
        except InputError as error:
            if tp is not None or shared == 1:
                raise
            search.excluded.append(Excluded(str(error), dp or 1, pp or 1, tp=shared))
    return search.result()


def tensor_widths_of(cluster: Cluster, tp: int | None) -> list[int]:
    """Numbers of ranks that may share layers: `tp`, or all that divide the devices of every node, the least first."""
    if tp is not None:
        if tp < 1 or cluster.num_devices % tp:
            raise InputError(
                f"tp = {tp} does not divide the {cluster.num_devices} devices of cluster '{cluster.name}': "
                f"use one of {', '.join(str(n) for n in _divisors(cluster.num_devices))}"
            )
        return [tp]
    return _divisors(math.gcd(*(group.devices_per_node for group in cluster.nodes)))


def widths_of(
    cluster: Cluster, job: Job, pp: int | None, dp: int | None, tp: int = 1
) -> list[tuple[int, int]]:
    """All (dp, pp) that use every device and divide the batch, deepest pipelines first."""
    count = cluster.num_devices // tp
    for name, fixed in (("pp", pp), ("dp", dp)):
        if fixed is not None and (fixed < 1 or count % fixed):
            raise InputError(
                f"{name} = {fixed} does not divide the {count} devices of cluster '{cluster.name}': "
                f"use one of {', '.join(str(n) for n in _divisors(count))}"
            )
    found = [
        (count // width, width)
        for width in reversed(_divisors(count))
        if pp in (None, width) and dp in (None, count // width) and job.global_batch % (count // width) == 0
    ]
    if not found:
        wanted = f"dp {dp or 'any'} x pp {pp or 'any'}"
        raise InputError(
            f"{wanted} on {count} devices leaves no whole share of a global batch of {job.global_batch}: "
            "dp x pp must be the number of devices and dp must divide the batch"
        )
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _microbatch_sizes(widths: Sequence[tuple[int, int]], job: Job, fixed: int | None) -> list[int]:
    """Sizes to try, growing: powers of two that divide a replica's share, or all divisors of odd shares."""
    shares = {job.global_batch // dp for dp, _ in widths}
    if fixed is not None:
        if not any(share % fixed == 0 for share in shares):
            raise InputError(
                f"microbatch = {fixed} divides no replica's share of the global batch of {job.global_batch} "
                f"({', '.join(map(str, sorted(shares)))} samples)"
            )
        return [fixed]
    sizes = {size for share in shares for size in _divisors(share) if share % 2 or size & (size - 1) == 0}
    return sorted(sizes)


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
    ) -> None:
        self.zero = zero
        self.reduce_dtype: Literal["fp32", "bf16"] | None = reduce_dtype
        self.recompute = recompute
        self.offload = offload
        self.reference = reference
        self.cluster = cluster
        self.job = job
        self.report = report
        self.schedules = schedules
        self.trace = trace
        self.tp, self.sequence_parallel = 1, False
        self.plans: list[Plan] = []
        self.excluded: list[Excluded] = []
        self.misses: list[Candidate] = []
        self.too_many_stages: list[PlanError] = []
        self.latest: tuple[int, BodyCosts] | None = None
        self.without_rule: set[str] = set()
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
            )

    def work_out(self, size: int, choices: list[Choice]) -> bool:
        """Every choice with microbatches of `size` samples; false if none of them came near fitting."""
        if self.latest is not None:
            known, body = self.latest
            choices = self._fitting(choices, body, size / known)
        if not choices:
            return False
        body = self._trace(size, self.tp)
        choices = self._fitting(choices, body, 1.0)
        for choice in choices:
            self.report(str(choice))
            self._work_out_one(choice, body)
        self.without_rule |= body.costing.without_rule
        self.latest = size, body
        return bool(choices)

    def _trace(self, size: int, tp: int) -> BodyCosts:
        self.report(f"tracing microbatches of {size}" + (f" for tp {tp}" if tp > 1 else ""))
        traced = self.job.traced(self.cluster.device.kind) | shared_layers(tp, self.sequence_parallel)
        graph = self.trace(self.reference, size, report=self.report, **traced)
        return BodyCosts(graph, costing(graph, self.cluster, self.job))

    def _fitting(self, choices: Iterable[Choice], body: BodyCosts, scale: float) -> list[Choice]:
        return [choice for choice in choices if self._may_fit(choice, body, scale)]

    def _may_fit(self, choice: Choice, body: BodyCosts, scale: float) -> bool:
        """Whether state and saved values alone, the latter `scale` times those of `body`, fit in some partition."""
        saved = saved_counts(make_program(choice))
        if self.recompute == "auto":
            saved = [min(count, 1) for count in saved]
        counts = [count * scale for count in saved]
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
            reason = f"needs {format_bytes(least)} a device or more, of {format_bytes(limit)}"
            self._exclude(choice, reason, least - limit)
        else:
            self._exclude(choice, f"no partition keeps every device within {format_bytes(limit)}")
        return False

    def _work_out_one(self, choice: Choice, body: BodyCosts) -> None:
        """Adds the plan of `choice`, or why there is none."""
        shards = choice.dp if choice.level else 1
        bound = lower_bound_seconds(body, choice.num_microbatches, choice.pp, self.job, shards)
        best = min((found.predictions.step_seconds for found in self.plans), default=math.inf)
        if bound > _HOPELESS * best:
            self._exclude(choice, f"takes at least {format_seconds(bound)} a step")
            return
        start, seconds = fastest_partition(body, choice, self.cluster)
        if seconds > _HOPELESS * best:
            self._exclude(choice, f"takes about {format_seconds(seconds)} a step")
            return
        self._work_out_within_memory(choice, body, start, saves=self.recompute == "auto" and seconds < best)

    def _work_out_within_memory(
        self, choice: Choice, body: BodyCosts, start: Sequence[int], saves: bool
    ) -> None:
        """Adds the plan of `choice` that leaves room for what the allocator loses, or why there is none.

        `saves`: whether it may recompute or offload, which takes long to work out and only pays for what could be fastest.
        """
        limit = self.job.usable_bytes(self.cluster.device)
        lost = 0  # to fragmentation, which only the replay of the allocator shows
        while True:
            within = self.job.model_copy(update={"memory_limit": limit - lost}) if lost else self.job
            candidate = self._fastest_that_fits(body, choice, start, within, saves)
            if candidate.excess_bytes > 0:
                self.misses.append(candidate)
                missing = candidate.excess_bytes
                self._exclude(choice, f"lacks {format_bytes(missing)} of memory a device", missing)
                return
            found = make_plan(candidate, body, self.reference)
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

    def _fastest_that_fits(
        self, body: BodyCosts, choice: Choice, start: Sequence[int], job: Job, saves: bool
    ) -> Candidate:
        """The partition within memory, or one that saves less than it would, whichever is faster."""
        kept = make_candidate(body, choice, self.cluster, job, start)
        if not saves or (kept.cuts == tuple(start) and kept.excess_bytes <= 0):
            return kept
        fastest = with_cuts(body, choice, start, self.cluster, job)
        saving = least_saving([fastest, kept], body, job, offload=self.offload)
        fitting = [one for one in (kept, saving) if one is not None and one.excess_bytes <= 0]
        return min(fitting, key=lambda one: run_timeline(one.line).makespan_s, default=kept)

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
        return Found(ranked(self.plans), self.excluded, warnings)

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
