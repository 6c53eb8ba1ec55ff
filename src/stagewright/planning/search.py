"""The search: every pipeline width, microbatch and schedule on a cluster, best first, within memory."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stagewright.cluster import Cluster
from stagewright.errors import InputError, TraceError
from stagewright.estimation.stages import BodyCosts
from stagewright.graph import OperatorGraph
from stagewright.planning.arranging import cluster_for, on_devices_of
from stagewright.planning.candidate import Choice, fastest_partition
from stagewright.planning.estimate import graph_of
from stagewright.planning.finalists import JOINT, joint_plans
from stagewright.planning.fitting import Fitting, Recompute, recompute_of
from stagewright.planning.found import Excluded, Found, UntilCtrlC, operator_warnings
from stagewright.planning.host_optimizer import HostOptimizer, checked
from stagewright.planning.job import Job
from stagewright.planning.lengths import best_over_lengths
from stagewright.planning.loss_pieces import (
    PIECE_TOKENS,
    LossPieces,
    in_pieces,
    logits_bytes,
    pieces_by_share,
    pieces_of_tokens,
    short_of_memory,
)
from stagewright.planning.mixed import check_mixed, plan_mixed, simple_schedules
from stagewright.planning.pipeline import body_costs
from stagewright.planning.plan import Plan, shared_layers
from stagewright.planning.predict import lower_bound_seconds
from stagewright.planning.ranking import ranked
from stagewright.planning.sharding import check_shard_size
from stagewright.planning.units import check_shard_units
from stagewright.planning.widths import microbatch_sizes, tensor_widths_of, whole_shares, widths_of
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_seconds

Trace = Callable[..., OperatorGraph]

SCHEDULES = ("1f1b", "gpipe", JOINT)
"""Tried unless others are named."""

_HOPELESS = 1.5
"""A configuration this many times slower than the best step found is not worked out."""
_ENOUGH = 10
"""Nor is one that is slower than so many that were found."""

_REFINED = 250
"""Stages of more operators are not looked at longer for what they recompute: it takes long and gains nothing."""


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
    recompute: Recompute | None = None,
    offload: bool = True,
    zero: int | None = None,
    reduce_dtype: Literal["fp32", "bf16"] | None = None,
    shard_size: int | None = None,
    shard_units: int | None = None,
    host_optimizer: HostOptimizer = "auto",
    loss_pieces: LossPieces = "auto",
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
        recompute: what stages recompute: ``none``, ``full``, all but what enters each layer, ``model``, what the model's own
            code checkpoints, or ``auto``, as much as memory asks for. By default ``model`` where that code checkpoints
            something, else ``auto``.
        offload: with ``auto``, whether stages may move what they save to the host and back.
        zero: what replicas share out, 0 to 3, gradients summed as stages finish; by default they are summed at the end of
            the batch and nothing is shared out.
        reduce_dtype: type in which gradients are summed over replicas; default the type they are added up in.
        shard_size: at most so many replicas, neighbours, share out among each other, others hold copies; default all.
        shard_units: pieces in which replicas gather and reduce a stage, with `zero` 2 and 3; default what is fastest.
        host_optimizer: whether the optimizer's state, and the step on it, are on the host's processors: ``never``,
            ``always``, or ``auto``, on ranks that lack memory, where that is faster than what else makes room.
        loss_pieces: slices of a microbatch's tokens for which head and loss are evaluated one after the other; ``auto``:
            several where the logits are a large part of a device, or where memory is short on the rank that makes them.
        trace: makes operator graphs; takes the arguments of `stagewright.tracing.cache.trace`.
        interruptible: whether Ctrl-C ends the search with the plans found so far, once there is one; a warning says so.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        TraceError: the model cannot be traced.
        PlanError: no configuration fits; says by how much the best misses and what would fit.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model)
    job.check_own()
    job.check_devices(cluster)
    host_optimizer = checked(host_optimizer, cluster)
    if not cluster.is_homogeneous:
        check_mixed(cluster, tp=tp, zero=zero, reduce_dtype=reduce_dtype, shard_size=shard_size)
        found = plan_mixed(
            reference, cluster, job, schedules=simple_schedules(cluster, schedules), pp=pp, dp=dp, microbatch=microbatch,
            recompute=recompute, offload=offload, loss_pieces=loss_pieces, report=report, trace=trace,
            interruptible=interruptible,
        )  # fmt: skip
        return over_lengths(found, cluster, report, trace)
    check_shard_size(zero, shard_size)
    check_shard_units(zero, shard_units)
    families = [name for name in schedules if name != JOINT] or ["1f1b"]
    search = _Search(
        reference, cluster, job, report, families, trace, recompute, offload, zero, reduce_dtype, shard_size,
        shard_units, host_optimizer, loss_pieces,
    )  # fmt: skip
    with UntilCtrlC(interruptible, search.plans) as searching:
        search.gather_all(tensor_widths_of(cluster, tp), sequence_parallel, microbatch, (pp, dp, tp))
        search.work_out()
        search.work_out_in_pieces()
        search.work_out_last_resort()
        search.refine()
        if JOINT in schedules and search.recompute != "full":
            search.search_jointly()
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
    """A choice to work out; `cuts` of its fastest partition, once they are known, and the cluster as its ranks see it."""

    choice: Choice
    body: BodyCosts
    cluster: Cluster
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


@dataclass
class _Search:
    """What is asked for, `plans` so far, and what waits to be worked out."""

    reference: ModelReference
    cluster: Cluster
    job: Job
    report: Callable[[str], None]
    schedules: Sequence[str]
    trace: Trace
    recompute: Recompute | None
    offload: bool
    zero: int | None
    reduce_dtype: Literal["fp32", "bf16"] | None
    shard_size: int | None
    shard_units: int | None
    host_optimizer: HostOptimizer
    loss_pieces: LossPieces
    tp: int = 1
    sequence_parallel: bool = False
    splits_sequence: bool = False
    """Whether ranks that share layers also split the sequence, where there are any."""
    memory: Fitting = field(init=False)
    plans: list[Plan] = field(default_factory=list)
    worked_out: dict[int, _Waiting] = field(default_factory=dict)
    """What plans, by identity, were made of."""
    waiting: _Queue = field(default_factory=_Queue)
    latest: tuple[int, BodyCosts] | None = None
    bodies: dict[tuple[int, int, int], BodyCosts] = field(default_factory=dict)
    piece_tokens: int = 0
    """Of the pieces that the loss is evaluated in from now on; 0: as `pieces_by_share` says."""
    has_pieces: bool = True
    """Whether the loss of the model can be evaluated in pieces at all, as far as is known."""
    without_rule: set[str] = field(default_factory=set)
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.memory = Fitting(
            self.reference, self.cluster, self.job, self.recompute, self.offload, self.host_optimizer
        )

    def share_layers(self, num_ranks: int, sequence_parallel: bool) -> None:
        """From now on, configurations in which so many ranks share every layer."""
        self.tp, self.sequence_parallel = num_ranks, sequence_parallel
        self.latest = None

    def choices(self, size: int, widths: Sequence[tuple[int, int]]) -> list[Choice]:
        """What to try with microbatches of `size` samples at every (dp, pp) whose share they divide."""
        return [
            Choice(
                dp,
                pp,
                size,
                count,
                schedule,
                recompute=self.recompute == "full",
                zero=self.zero,
                reduce_dtype=self.reduce_dtype,
                tp=self.tp,
                sequence_parallel=self.sequence_parallel,
                most_sharing=self.shard_size,
                host_optimizer=self.host_optimizer == "always",
                shard_units=self.shard_units,
                as_model=self.recompute == "model",
            )
            for dp, pp, count in whole_shares(widths, self.job, size)
            for schedule in (self.schedules if pp > 1 else self.schedules[:1])
        ]

    def gather_all(
        self,
        tensor_widths: Sequence[int],
        sequence_parallel: bool,
        microbatch: int | None,
        asked: tuple[int | None, int | None, int | None],
    ) -> None:
        """Trace what is needed and queue every configuration; `asked` are the fixed pp, dp and tp."""
        self.splits_sequence = sequence_parallel
        pp, dp, tp = asked
        for shared in tensor_widths:
            self.share_layers(shared, sequence_parallel and shared > 1)
            try:
                widths = widths_of(self.cluster, self.job, pp, dp, shared)
                for size in microbatch_sizes(widths, self.job, microbatch):
                    self._settle(size)
                    if not self.gather(size, self.choices(size, widths)):
                        break
            except InputError as error:
                if tp is not None or shared == 1:
                    raise
                self.memory.excluded.append(Excluded(str(error), dp or 1, pp or 1, tp=shared))

    def gather(self, size: int, choices: list[Choice]) -> bool:
        """Every choice with microbatches of `size` samples that may fit waits to be worked out; false if none does."""
        if self.latest is not None:
            known, body = self.latest
            choices = self.memory.may_fit(choices, body, size / known)
            if not self.memory.holds_one(choices, body, size / known):
                for choice in choices:
                    self.memory.exclude(
                        choice, "recomputes more than smaller microbatches, which may fit too"
                    )
                return False
        if not choices:
            return False
        body = self._body(size, self.tp)
        choices = [replace(choice, loss_pieces=_pieces_of(body)) for choice in choices]
        choices = self.memory.may_fit(choices, body, 1.0)
        for choice in choices:
            self._wait(choice, body)
        self.without_rule |= body.costing.without_rule
        self.latest = size, body
        return bool(choices)

    def _wait(self, choice: Choice, body: BodyCosts) -> None:
        shards = choice.shard_size or choice.dp if choice.level else 1
        bound = lower_bound_seconds(body, choice.num_microbatches, choice.pp, self.job, shards)
        self.waiting.push(bound, _Waiting(choice, body, self.cluster))

    def work_out(self) -> None:
        """Every choice that waits, the most promising first, so that what saving costs is worked out for few."""
        while self.waiting:
            bound, one = self.waiting.pop()
            best = self._best_seconds()
            if bound > self._hopeless_seconds():
                about = "at least" if one.cuts is None else "about"
                self.memory.exclude(one.choice, f"takes {about} {format_seconds(bound)} a step")
            elif one.cuts is None:
                where = cluster_for(one.choice, one.body, self.cluster, self.job)
                cuts, seconds = fastest_partition(one.body, one.choice, where)
                self.waiting.push(max(bound, seconds), replace(one, cluster=where, cuts=cuts))
            else:
                self.report(str(one.choice))
                saves = self.recompute == "auto" and bound < best
                fitting = replace(self.memory, cluster=one.cluster)  # with the same lists of what is none
                found = fitting.plan(one.choice, one.body, one.cuts, saves, best)
                if found is not None:
                    self._add(on_devices_of(found, self.cluster, one.cluster), one)
                while self.memory.on_host:
                    self._wait(self.memory.on_host.pop(0), one.body)

    def work_out_in_pieces(self) -> None:
        """What is short of the memory that logits take, once more with the loss in pieces."""
        for tokens in PIECE_TOKENS if self.loss_pieces == "auto" else ():
            if self.piece_tokens and self.plans:
                break
            limit = self.job.usable_bytes(self.cluster.device)
            shapes = short_of_memory(self.plans, self.memory.excluded, self._logits_bytes, limit)
            self.piece_tokens = tokens
            for shape in shapes:
                size, tp = shape.microbatch_size, shape.tp
                if (size, tp, self._pieces(size, tp)) not in self.bodies:
                    self.share_layers(tp, self.splits_sequence and tp > 1)
                    self.gather(size, self.choices(size, shape.widths))
            self.work_out()

    def work_out_last_resort(self) -> None:
        """Where nothing has fitted."""
        if not self.plans:
            self.report("making room")
            last = self.memory.last_resort(self._body_of)
            self.plans += [] if last is None else [last]

    def refine(self) -> None:
        """Looks longer for what the best plan recomputes, where it does."""
        best = min(self.plans, key=lambda one: one.predictions.step_seconds, default=None)
        one = self.worked_out.get(id(best))
        if best is None or one is None or one.cuts is None or not _may_be_refined(best):
            return
        self.report("looking for what is best recomputed")
        fitting = replace(self.memory, cluster=one.cluster)
        found = fitting.refined(one.choice, one.body, one.cuts)
        if found is not None and found.predictions.step_seconds < best.predictions.step_seconds:
            self.plans.remove(best)
            self._add(on_devices_of(found, self.cluster, one.cluster), one)

    def _add(self, plan: Plan, made_of: _Waiting) -> None:
        self.plans.append(plan)
        self.worked_out[id(plan)] = made_of

    def search_jointly(self) -> None:
        """Adds plans of the joint search that are faster than the best of the families.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was found until then is added.
        """
        stop = threading.Event()
        for found in joint_plans(
            tuple(self.plans), lambda plan: self.bodies[plan.microbatch_size, plan.tp, plan.loss_pieces], self.cluster,
            self.job, self.reference, zero=self.zero, as_model=self.recompute == "model", shard_units=self.shard_units,
            saves=self.recompute == "auto", offload=self.offload,
            host_optimizer=self.memory.host_optimizer, report=self.report, stop=stop,
        ):  # fmt: skip
            self.plans.append(found)
        if stop.is_set():
            raise KeyboardInterrupt

    def _hopeless_seconds(self) -> float:
        """What a step may take at most to be worked out."""
        found = sorted(one.predictions.step_seconds for one in self.plans)
        enough = found[_ENOUGH - 1] if len(found) >= _ENOUGH else math.inf
        return min(_HOPELESS * self._best_seconds(), enough)

    def _best_seconds(self) -> float:
        return min((found.predictions.step_seconds for found in self.plans), default=math.inf)

    def _settle(self, size: int) -> None:
        """What is recomputed, by the model where nobody says."""
        if not self.is_settled and self.recompute in (None, "model"):
            graph = self._body(size, self.tp).graph
            self.recompute = self.memory.recompute = recompute_of(self.recompute, graph)
        self.is_settled = True

    def _body_of(self, choice: Choice) -> BodyCosts:
        known = self.bodies.get((choice.microbatch_size, choice.tp, choice.loss_pieces))
        return self._body(choice.microbatch_size, choice.tp) if known is None else known

    def _body(self, size: int, tp: int) -> BodyCosts:
        """The costs of the model with the loss in as many pieces as `_pieces` says, traced once."""
        known = self.bodies.get((size, tp, self._pieces(size, tp)))
        return self._trace(size, tp) if known is None else known

    def _trace(self, size: int, tp: int) -> BodyCosts:
        """The costs of the model in as many pieces as `_pieces` says, or at once where it is found to have none."""
        pieces = self._pieces(size, tp)
        how = f" for tp {tp}" * (tp > 1) + f" with the loss in {pieces} pieces" * (pieces > 1)
        self.report(f"tracing microbatches of {size}{how}")
        layers = shared_layers(tp, self.sequence_parallel) | in_pieces(pieces)
        traced = self.job.traced(self.cluster.device.kind) | layers
        try:
            graph = self.trace(self.reference, size, report=self.report, **traced)
        except (InputError, TraceError):
            if pieces == 1 or self.loss_pieces != "auto":
                raise
            self.has_pieces = False
            return self._trace(size, tp)
        body = self.bodies[size, tp, pieces] = body_costs(graph, self.cluster, self.job)
        return body

    def _pieces(self, size: int, tp: int) -> int:
        """In how many pieces the loss of a microbatch is evaluated from now on."""
        if self.loss_pieces != "auto":
            return self.loss_pieces
        num_tokens, logits = size * self.job.sequence_length, self._logits_bytes(size, tp)
        if not self.has_pieces or not logits:
            return 1
        by_share = pieces_by_share(logits, num_tokens, self.job.usable_bytes(self.cluster.device))
        return (
            max(by_share, pieces_of_tokens(self.piece_tokens, num_tokens)) if self.piece_tokens else by_share
        )

    def _logits_bytes(self, size: int, tp: int) -> int:
        return logits_bytes(self.reference, size * self.job.sequence_length, tp)

    def result(self) -> Found:
        if not self.plans:
            raise self.memory.nothing_fits()
        beyond = self.job.beyond(self.cluster.device)
        warnings = operator_warnings(self.without_rule) + ([] if beyond is None else [beyond])
        return Found(ranked(self.plans), self.memory.excluded, warnings)


def _may_be_refined(plan: Plan) -> bool:
    """Whether a stage that recomputes is small enough to look longer."""
    return any(
        stage.recompute_seconds and stage.stop - stage.start <= _REFINED for stage in plan.predictions.stages
    )


def _pieces_of(body: BodyCosts) -> int:
    """In how many pieces a traced model evaluates its loss."""
    return body.graph.facts.get("loss_pieces", 1)
