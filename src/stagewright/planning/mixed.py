"""Plans for clusters of several kinds of devices: stages as long as their devices are fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.cluster import Cluster, arranged
from stagewright.errors import InputError, PlanError, nearest
from stagewright.estimation.stages import BodyCosts
from stagewright.graph import OperatorGraph
from stagewright.planning.advice import misses_memory
from stagewright.planning.candidate import Candidate, Choice, make_plan, with_cuts
from stagewright.planning.finalists import JOINT
from stagewright.planning.fitting import Recompute, recompute_of
from stagewright.planning.found import Excluded, Found, UntilCtrlC, operator_warnings
from stagewright.planning.host_optimizer import saving_with_hosts
from stagewright.planning.job import Job
from stagewright.planning.loss_pieces import LossPieces, in_pieces
from stagewright.planning.partition import Floats, Ints
from stagewright.planning.pipeline import bodies_of, body_costs
from stagewright.planning.plan import ClusterSection, Plan
from stagewright.planning.predict import run_timeline
from stagewright.planning.widths import microbatch_sizes, whole_shares, widths_of
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_bytes

Report = Callable[[str], None]

ONE_STAGE_EACH = ("1f1b", "gpipe")
"""Schedules that are tried."""

_TRIALS = 3
"""How often memory is left free for fragmentation before a configuration is given up."""


def simple_schedules(cluster: Cluster, schedules: Iterable[str]) -> list[str]:
    """Those of `schedules` that are tried; the joint search, one of the defaults, is passed over.

    Raises:
        InputError: there is none, or another family among them.
    """
    named = [name for name in schedules if name != JOINT]
    other = next((name for name in named if name not in ONE_STAGE_EACH), None if named else JOINT)
    if other is not None:
        raise InputError(
            f"schedule '{other}'{nearest(other, ONE_STAGE_EACH)}: plans for cluster '{cluster.name}', which mixes devices, "
            f"have {' or '.join(ONE_STAGE_EACH)}"
        )
    return named


def check_mixed(
    cluster: Cluster, *, tp: int | None, zero: int | None, reduce_dtype: str | None, shard_size: int | None
) -> None:
    """Raises `InputError` for what plans over several kinds of devices do not have."""
    asked = {
        "--tp": tp not in (None, 1),
        "--zero": zero is not None,
        "--reduce-dtype": reduce_dtype is not None,
        "--shard-size": shard_size is not None,
    }
    given = [name for name, is_given in asked.items() if is_given]
    if given:
        raise InputError(
            f"cluster '{cluster.name}' mixes devices: plans for it have no shared layers, no ZeRO, and "
            f"sums of gradients in one type only; leave out {', '.join(given)}, or name a part of one kind"
        )


def plan_mixed(
    reference: ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    schedules: Sequence[str] = ("1f1b",),
    pp: int | None = None,
    dp: int | None = None,
    microbatch: int | None = None,
    recompute: Recompute | None = None,
    offload: bool = True,
    loss_pieces: LossPieces = "auto",
    report: Report = lambda stage: None,
    trace: Callable[..., OperatorGraph] = cached_trace,
    interruptible: bool = False,
) -> Found:
    """Plans of `reference` on a cluster of several kinds of devices, fastest first: one stage per pipeline rank, cut so
    that the slowest rank is as fast as can be by the costs on its own devices.

    Devices of a kind are next to each other in the pipeline, the fast ones first or last. Every rank has the memory of its
    own device; where that is not enough, cuts move and ranks recompute and offload as on equal devices. Ignores: layers
    shared by ranks; what replicas could share out; pieces of the loss that are not asked for. Ctrl-C ends
    the search if it is `interruptible` and there is a plan.

    Raises:
        InputError: widths or a device that cannot be used.
        PlanError: nothing fits.
    """
    task = _Task(reference, cluster, job, recompute or "auto", offload)
    widths = widths_of(cluster, job, pp, dp)
    plans: list[Plan] = []
    misses: list[Candidate] = []
    excluded: list[Excluded] = []
    without_rule: set[str] = set()
    with UntilCtrlC(interruptible, plans) as searching:
        for size in microbatch_sizes(widths, job, microbatch):
            report(f"tracing microbatches of {size}")
            pieces = 1 if loss_pieces == "auto" else loss_pieces
            traced = job.traced(cluster.kind) | in_pieces(pieces)
            graph = trace(reference, size, report=report, **traced)
            task = replace(task, recompute=recompute_of(recompute, graph))
            body = body_costs(graph, cluster, job)
            without_rule |= body.costing.without_rule
            for choice in _choices(task, size, widths, schedules, pieces):
                report(str(choice))
                for made in _made(task, body, choice):
                    if isinstance(made, Plan):
                        plans.append(made)
                    elif isinstance(made, Candidate):
                        misses.append(made)
                        excluded.append(_missed(made))
                    else:
                        excluded.append(made)
    if not plans and misses:
        raise misses_memory(min(misses, key=lambda one: one.excess_bytes), job)
    if not plans:
        raise PlanError(excluded[0].reason if excluded else "no configuration has a whole share of the batch")
    best_first = sorted(plans, key=lambda one: one.predictions.step_seconds)
    return searching.told(Found(best_first, excluded, operator_warnings(without_rule)))


@dataclass(frozen=True)
class _Task:
    """What all configurations of a search have in common."""

    reference: ModelReference
    cluster: Cluster
    job: Job
    recompute: Recompute
    offload: bool

    def with_less_memory(self, num_bytes: int) -> _Task:
        """The same where every device may use `num_bytes` less."""
        limit = self.job.memory_limit
        less = {} if limit is None else {"memory_limit": limit - num_bytes}
        return replace(
            self, cluster=_with_less_memory(self.cluster, num_bytes), job=self.job.model_copy(update=less)
        )

    def on(self, order: tuple[int, ...]) -> _Task:
        """The same on devices in `order`."""
        return replace(self, cluster=arranged(self.cluster, order))


def _choices(
    task: _Task, size: int, widths: Sequence[tuple[int, int]], schedules: Sequence[str], pieces: int
) -> list[Choice]:
    return [
        Choice(
            num_replicas,
            num_stages,
            size,
            count,
            schedule,
            recompute=task.recompute == "full",
            as_model=task.recompute == "model",
            loss_pieces=pieces,
        )
        for num_replicas, num_stages, count in whole_shares(widths, task.job, size)
        for schedule in schedules
    ]


def _missed(candidate: Candidate) -> Excluded:
    missing = candidate.excess_bytes
    return Excluded.of(candidate.choice, f"lacks {format_bytes(missing)} of memory on a device", missing)


def _made(task: _Task, body: BodyCosts, choice: Choice) -> Iterator[Plan | Candidate | Excluded]:
    """Of every order of the devices the plan of `choice`, or the candidate that lacks memory, or why there is none."""
    try:
        for order in _orders(task.cluster, body):
            yield _planned(task, body, choice, order)
    except PlanError as error:  # it cannot be cut into so many stages
        yield Excluded.of(choice, str(error))


def _orders(cluster: Cluster, body: BodyCosts) -> list[tuple[int, ...]]:
    """Devices by rank: the fastest kind first, and last."""
    kinds = {group.device for group in cluster.nodes}
    seconds = {kind: float(body.on(kind).seconds[-1]) for kind in kinds}
    ranks = range(cluster.num_devices)
    fast_first = sorted(ranks, key=lambda rank: (seconds[cluster.device_of(rank)], rank))
    slow_first = sorted(ranks, key=lambda rank: (-seconds[cluster.device_of(rank)], rank))
    return list(dict.fromkeys((tuple(fast_first), tuple(slow_first))))


def _planned(task: _Task, body: BodyCosts, choice: Choice, order: tuple[int, ...]) -> Plan | Candidate:
    """The plan of a choice on devices in `order`, with room for what the allocators lose, or a candidate that lacks memory.

    Raises:
        PlanError: too few legal cuts.
    """
    lost = 0
    short: Candidate | None = None
    for _ in range(_TRIALS):
        one = _candidate(task.with_less_memory(lost).on(order), body, choice)
        if one.excess_bytes > 0:
            return short or one
        made = make_plan(one, body, task.reference)
        missing = max(
            rank.reserved_peak_bytes - one.line.usable_bytes(rank.rank) - lost
            for rank in made.predictions.ranks
        )
        if missing <= 0:
            section = ClusterSection.of(task.cluster)
            return made.model_copy(update={"cluster": section, "devices": order, "job": task.job})
        whole = replace(one.line, cluster=arranged(task.cluster, order), job=task.job)
        short = replace(one, line=whole, excess_bytes=missing)
        lost += missing
    assert short is not None
    return short


def _with_less_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    """`cluster` whose devices all may use `num_bytes` less."""
    if not num_bytes:
        return cluster
    nodes = []
    for group in cluster.nodes:
        less = math.ceil(num_bytes / (1 - group.device.reserve_fraction))
        device = group.device.model_copy(update={"memory_bytes": group.device.memory_bytes - less})
        nodes.append(group.model_copy(update={"device": device}))
    figures = {name: getattr(cluster, name) for name in Cluster.model_fields}
    return Cluster(**{**figures, "nodes": tuple(nodes)})


def _candidate(task: _Task, body: BodyCosts, choice: Choice) -> Candidate:
    """The partition of least bottleneck by the costs on every rank's own device, or one with narrower boundaries or that
    gives up as little as its ranks must: what is fastest of those that fit."""
    bodies = bodies_of(body, task.cluster, choice.pp, choice.dp)
    plain = with_cuts(body, choice, balanced_cuts(bodies), task.cluster, task.job)
    if task.recompute != "auto":
        return plain
    saving = saving_with_hosts([plain], body, "never", offload=task.offload)
    fitting = [one for one in (plain, saving) if one is not None and one.excess_bytes <= 0]
    return min(fitting, key=lambda one: run_timeline(one.line).makespan_s, default=plain)


def balanced_cuts(bodies: Sequence[BodyCosts]) -> list[int]:
    """Cuts of one stage for each of `bodies`, the same model on each stage's device, whose slowest stage is as fast as
    can be.

    Raises:
        PlanError: too few legal cuts.
    """
    graph, legal = bodies[0].graph, bodies[0].legal_cuts
    if len(bodies) - 1 > len(legal):
        raise PlanError(f"model '{graph.name}' can be cut at {len(legal)} places only: use fewer stages")
    ends = np.concatenate([[0], legal, [bodies[0].size]]).astype(np.int64)
    times = [body.seconds[ends] for body in bodies]
    low, high = 0.0, max(float(time[-1]) for time in times)
    best = _reach(ends, times, high)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        reached = _reach(ends, times, middle)
        low, high, best = (low, middle, reached) if reached else (middle, high, best)
    assert best is not None
    return best


def _reach(ends: Ints, times: Sequence[Floats], bottleneck: float) -> list[int] | None:
    """Cuts of stages that each go as far as they may within `bottleneck` seconds; None if that is not far enough."""
    at, cuts, last = 0, [], len(ends) - 1
    for stage, time in enumerate(times):
        farthest = int(np.searchsorted(time, time[at] + bottleneck * (1 + 1e-12), side="right")) - 1
        end = min(farthest, last - (len(times) - 1 - stage))
        if end <= at:
            return None
        at = end
        cuts.append(int(ends[end]))
    return cuts[:-1] if at == last else None
