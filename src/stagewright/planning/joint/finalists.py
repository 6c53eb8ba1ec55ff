"""The joint search for the best configurations of a model: cuts, placement and program found together.

The families that a search tries come with one stage or a few per rank, cut for equal time. For the configurations
that promise most, `joint_candidate` searches all three anew from the costs of small pieces of the traced model, and
judges what it finds as every other candidate is judged: split, simulated and replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

from stagewright.arrays import Ints
from stagewright.cluster import Cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.arranging import on_devices_of
from stagewright.planning.bounds.coarse import Coarse
from stagewright.planning.candidate import (
    Candidate,
    make_plan,
    of_line,
    saving_candidate,
    under_program,
    with_program,
)
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import Problem
from stagewright.planning.joint.search import Effort, Found, search
from stagewright.planning.joint.traced import (
    Known,
    Wiring,
    cuts_of,
    piece_ends,
    problem_of,
    with_backwards,
    without_splits,
)
from stagewright.planning.memory.fitting import Fit
from stagewright.planning.memory.host_optimizer import host_excess_bytes, ways_on_hosts
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.pipeline import Pipeline
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.space import JOINT, HostOptimizer, Space
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_seconds

NUM_FINALISTS = 2
"""Configurations that are searched jointly."""
MOST_FILLED = 0.15
"""Part of a step that the joint search may be expected to gain over the families; pipelines that are slower than the best by
more are not searched."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 16
_ACTIONS_PER_ROUND = 750
"""A search has a round for so many actions of a batch whose every piece is a stage, within the limits above."""
_CLOSE_ENOUGH = 0.002
"""A search ends this near to its bound; estimates are not that exact."""
_JUDGED = 3
"""Plans of one search that are split and judged."""
_MARGINS = (0.0, 0.005, 0.04)
"""The least part of memory that each trial leaves free for fragmentation, in addition to those before it."""
_MISJUDGED = 0.01
"""Part of a batch by which the costs of pieces may be too high."""
_MISJUDGED_ALIKE = 0.005
"""Part by which they may be too high in one plan and not in another of the same search."""
_SAVED = 1
"""Of these, how many are made to fit by recomputing and offloading, which takes long."""


def finalists(fits: Iterable[Fit], count: int = NUM_FINALISTS) -> list[Fit]:
    """Of the pipelines that could still become the fastest plan, return the fastest of each configuration: those
    whose bounds are lowest, at most `count`."""
    fastest_first = sorted(fits, key=lambda fit: fit.step_seconds)
    shapes: dict[tuple[object, ...], Fit] = {}
    for fit in fastest_first:
        plan, best_s = fit.plan, fastest_first[0].step_seconds
        is_near = fit.step_seconds < (1 + MOST_FILLED) * best_s
        if plan.pp > 1 and is_near and plan.predictions.lower_bound_seconds < best_s:
            key = plan.dp, plan.tp, plan.sequence_parallel, plan.pp, plan.microbatch_size, plan.loss_pieces
            shapes.setdefault(key, fit)
    return sorted(shapes.values(), key=lambda fit: fit.plan.predictions.lower_bound_seconds)[:count]


def joint_plans(
    fits: Sequence[Fit], coarse: Coarse, space: Space, stop: threading.Event | None = None
) -> Iterator[Fit]:
    """Yield plans of the joint search for the configurations of `fits`, those of the schedules, each faster than all of
    these and than those before it; none on devices of several kinds.

    Ctrl-C during a search sets `stop`, which ends this with what the search has found.
    """
    stop = stop or threading.Event()
    job = coarse.job
    best = min((fit.step_seconds for fit in fits), default=0.0)
    for fit in finalists(fits):
        if stop.is_set():
            return
        known, entry = fit.plan, fit.entry
        cluster = entry.cluster
        if known.predictions.lower_bound_seconds >= best or not cluster.is_homogeneous:
            continue
        body = coarse.body(entry.configuration.traced)
        configuration = _joint(entry.configuration, known, space)
        searches = Searches(known, body, configuration, cluster, best, coarse.report, stop)
        plan = _joint_plan(searches, job, coarse.reference, space.host_optimizer)
        if plan is not None and plan.predictions.step_seconds < best:
            best = plan.predictions.step_seconds
            yield Fit(on_devices_of(plan, known.cluster.load(), cluster), entry)


def _joint(configuration: Configuration, known: Plan, space: Space) -> Configuration:
    """Return `configuration`, of which `known` was made, with its schedule to be searched."""
    return replace(
        configuration,
        schedule=JOINT,
        recompute="none" if configuration.recompute == "full" else configuration.recompute,
        chunks=None,
        layers_per_stage=None,
        offload=space.offload,
        headroom=0,
        host_optimizer=bool(known.host_optimizer),
    )


def _joint_plan(
    searches: Searches, job: Job, reference: ModelReference, host_optimizer: HostOptimizer
) -> Plan | None:
    """Within memory that leaves room for what the allocator loses, which only the replay of a plan shows."""
    limit, lost, missing = job.usable_bytes(searches.cluster.device), 0, 0
    for trial, margin in enumerate(_MARGINS):
        lost += max(missing, int(margin * limit))
        within = job.model_copy(update={"memory_limit": limit - lost}) if lost else job
        candidate = joint_candidate(searches, within, tight=trial > 0)
        if candidate is None:
            return None
        ways = [one for one in ways_on_hosts(candidate, host_optimizer) if host_excess_bytes(one.line) <= 0]
        if not ways:
            return None
        for one in ways:
            found = make_plan(one, searches.body, reference)
            missing = found.predictions.reserved_peak_bytes - limit
            if missing <= 0:
                return found.model_copy(update={"job": job})
        missing += max(0, -candidate.excess_bytes)  # with less lost the same would be found again
    return None


@dataclass(frozen=True, eq=False)
class Searches:
    """The joint searches for one configuration, of which `known` is the best plan of a family.

    Each is made once, when it is first needed; what they find is made to fit by recomputing and offloading as the
    configuration allows.
    """

    known: Plan
    body: RangeCosts
    configuration: Configuration
    cluster: Cluster
    below_s: float
    """Steps that take as long are of no use."""
    report: Callable[[str], None] = lambda stage: None
    stop: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def ends(self) -> Ints:
        """Of the pieces that take the place of layers."""
        return piece_ends(self.body, self.configuration.pp)

    @cached_property
    def unlimited(self) -> Found | None:
        """As if there were memory for everything."""
        return self._found(replace(self._learnt, memory_bytes=[float("inf")] * self.known.pp), saves=False)

    @cached_property
    def limited(self) -> Found | None:
        """Within memory; None where nothing fits."""
        return self._found(self._learnt, saves=self.configuration.saves)

    @cached_property
    def _learnt(self) -> Known:
        return learn(self.known, self.body, self.configuration)

    def _found(self, learnt: Known, saves: bool) -> Found | None:
        configuration = self.configuration
        wiring = Wiring(
            self.cluster,
            configuration.pp,
            configuration.dp * configuration.tp,
            self.known.job.uses_lanes(self.cluster),
        )
        problem = problem_of(
            self.body, self.ends, configuration.num_microbatches, wiring, learnt, saves=saves
        )
        return _searched(problem, self.report, str(configuration), self.stop)


def joint_candidate(searches: Searches, job: Job, *, tight: bool = False) -> Candidate | None:
    """The fastest plan within the memory of `job` that `searches` find; None if nothing found fits, or would be of use
    if it did.

    Searched first, unless memory is `tight`, as if there were enough for everything, and if the result lacks some within
    memory. Plans that lack memory recompute or offload as much as they must.
    """
    fitting: list[Candidate] = []
    for limited in (True,) if tight else (False, True):
        if fitting and searches.stop.is_set():
            break
        found = searches.limited if limited else searches.unlimited
        if found is None:
            continue
        best = _first_that_fits(_candidates(found, searches, job), searches, limited)
        fitting += [best] if best is not None else []
        if best is not None and set(best.memory_policy) == {"keep"}:
            break
    return min(fitting, key=lambda each: _makespan(each.line), default=None)


def _candidates(found: Found, searches: Searches, job: Job) -> list[Candidate]:
    """The fastest of what was found that could be of use, keeping everything."""
    longest = searches.below_s
    if found.best.makespan_s > longest * (1 + _MISJUDGED):
        return []
    timed = sorted(_lines(found, searches, job), key=itemgetter(0))[:_JUDGED]
    return [of_line(searches.configuration, cuts, line) for seconds, cuts, line in timed if seconds < longest]


def _lines(found: Found, searches: Searches, job: Job) -> Iterator[tuple[float, tuple[int, ...], Pipeline]]:
    """The plans worth judging, each with split and with whole backwards, keeping everything, with the cuts of their stages;
    and the seconds of a batch with what the search would have the ranks make again. Without those that would be of no use
    if their pieces were misjudged like those in front of them."""
    body, configuration = searches.body, searches.configuration
    misjudged = 1 - _MISJUDGED
    for plan in map(without_splits, _worth_judging(found)):
        if plan.makespan_s * misjudged > searches.below_s:
            continue
        kept = judged(plan.name, plan.problem, replace(plan.layout, thrift=()), plan.encoded)
        again = plan.makespan_s - kept.makespan_s
        cuts = cuts_of(plan, searches.ends)
        split = with_program(body, configuration, cuts, plan.program, searches.cluster, job)
        seconds = _makespan(split) + again
        misjudged = max(misjudged, seconds / plan.makespan_s - _MISJUDGED_ALIKE)
        yield seconds, cuts, split
        if (whole := with_backwards(plan)) != plan.program:
            line = under_program(split, configuration, cuts, whole)
            yield _makespan(line) + again, cuts, line


def _first_that_fits(candidates: Sequence[Candidate], searches: Searches, limited: bool) -> Candidate | None:
    """Of candidates in order, the first within memory; else the first that saving brings there. Unless the search was
    `limited` to memory, only of those that need less than twice of it: beyond that nearly everything is made again."""
    kept = next((one for one in candidates if one.excess_bytes <= 0), None)
    if kept is not None or not searches.configuration.saves:
        return kept
    hopeful = [
        one
        for one in candidates
        if limited or one.excess_bytes < one.line.job.usable_bytes(one.line.cluster.device)
    ]
    found = (
        saving_candidate(one, searches.body, offload=searches.configuration.offload)
        for one in hopeful[:_SAVED]
    )
    return next((one for one in found if one is not None), None)


def learn(known: Plan, body: RangeCosts, configuration: Configuration) -> Known:
    """What the predictions of `known` say beyond the costs of ranges."""
    stages, ranks = known.predictions.stages, known.predictions.ranks
    extra = 0.0
    share = configuration.state_share(known.job.precision)
    state = [0.0] * known.pp
    for stage, rank in zip(stages, known.placement, strict=True):
        took = stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        extra += took - stage.recompute_seconds - float(body.seconds[stage.stop] - body.seconds[stage.start])
        state[rank] += share * float(body.state_bytes[stage.stop] - body.state_bytes[stage.start])
    limit = known.job.usable_bytes(known.cluster.load().device)
    room = []
    for rank, own in zip(ranks, state, strict=True):
        beside = rank.reserved_peak_bytes - own - sum(saved.num_bytes for saved in rank.saved)
        room.append(max(1.0, limit - max(0.0, beside)))
    return Known(max(0.0, extra) / (3 * len(stages)), room, share)


def _searched(
    problem: Problem, report: Callable[[str], None], what: str, stop: threading.Event | None
) -> Found | None:
    """None where no plan fits the memory of `problem`."""

    def told(best_s: float, bound_s: float) -> None:
        report(f"{what}: best batch {format_seconds(best_s)}, none below {format_seconds(bound_s)}")

    wanted = 3 * problem.layers.num_layers * problem.num_microbatches // _ACTIONS_PER_ROUND
    rounds = _MOST_ROUNDS if problem.thrifty else min(max(wanted, _FEWEST_ROUNDS), _MOST_ROUNDS)
    try:
        return search(problem, Effort(rounds=rounds, gap=_CLOSE_ENOUGH), report=told, stop=stop)
    except PlanError:
        return None


def _worth_judging(found: Found) -> Iterator[JointPlan]:
    """The best plans with different stages, however much of them is made again, and the best of the families."""
    known = set()
    for plan in (found.best, *found.runners_up):
        if _stages(plan) not in known and len(known) < _JUDGED:
            known.add(_stages(plan))
            yield plan
    family = next((plan for plan in found.baselines if plan.fits), None)
    if family is not None and _stages(family) not in known:
        yield family


def _stages(plan: JointPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.layout.ends, plan.layout.rank_of_stage


def _makespan(line: Pipeline) -> float:
    return run_timeline(line).makespan_s
