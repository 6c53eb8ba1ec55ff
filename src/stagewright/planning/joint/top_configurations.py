"""The joint search for the top-k configurations of a model: cuts, placement and program together.

The schedules that a search tries have one or a few stages per rank, cut for equal time. For the most promising
configurations, `joint_candidate` searches all three from the costs of small pieces of the traced model, and evaluates
the results like every other candidate: split, simulated and replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter

from stagewright.arrays import Ints
from stagewright.cluster import Cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.machine import at_once
from stagewright.planning.arranging import on_devices_of
from stagewright.planning.bounds.coarse import Coarse
from stagewright.planning.candidate import (
    Candidate,
    candidate_of,
    fitted_candidate,
    make_plan,
    under_program,
    with_program,
)
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.joint.search import Effort, JointResult, search
from stagewright.planning.joint.traced import (
    Calibration,
    LinkModel,
    cuts_of,
    piece_ends,
    problem_of,
    with_backwards,
    without_splits,
)
from stagewright.planning.memory.fitting import Fit
from stagewright.planning.memory.host_optimizer import host_excess_bytes, ways_on_hosts
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.staged_model import StagedModel
from stagewright.planning.space import JOINT, HostOptimizer, Space
from stagewright.text import silent
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_seconds

NUM_SEARCHED = 2
"""Number of configurations that are searched jointly."""
MOST_FILLED = 0.15
"""Fraction of a step that the joint search may gain over the schedules; pipelines that are slower than the best by more are
not searched."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 16
_ACTIONS_PER_ROUND = 750
"""Actions per round of a search, of a batch with every piece as a stage; the number of rounds has the limits above."""
_CLOSE_ENOUGH = 0.002
"""Relative distance to the bound at which a search ends; estimates are not that exact."""
_JUDGED = 3
"""Number of plans of one search that are split and evaluated."""
_MARGINS = (0.0, 0.005, 0.04)
"""Minimum fraction of memory that each trial leaves free for fragmentation, in addition to the trials before it."""
_MISJUDGED = 0.01
"""Fraction of a batch by which the costs of pieces may be too high."""
_MISJUDGED_ALIKE = 0.005
"""Fraction by which they may be too high in one plan and not in another of the same search."""
_SAVED = 1
"""Number of these that are made to fit by recomputation and offload, which takes long."""


def top_configurations(fits: Iterable[Fit], best_s: float) -> list[Fit]:
    """Return the fastest pipeline of each configuration that could still become faster than `best_s`: those with the lowest
    bounds, at most `NUM_SEARCHED`."""
    shapes: dict[tuple[object, ...], Fit] = {}
    for fit in sorted(fits, key=lambda fit: fit.step_seconds):
        plan = fit.plan
        is_near = fit.step_seconds < (1 + MOST_FILLED) * best_s
        least_s = max(plan.predictions.lower_bound_seconds, busy_seconds(plan))
        if plan.pp > 1 and is_near and least_s < best_s and not plan.streamed:
            key = plan.dp, plan.tp, plan.sequence_parallel, plan.pp, plan.microbatch_size, plan.loss_pieces
            shapes.setdefault(key, fit)
    return sorted(shapes.values(), key=lambda fit: fit.plan.predictions.lower_bound_seconds)[:NUM_SEARCHED]


def busy_seconds(plan: Plan) -> float:
    """Return what the ranks of a plan compute on average, recomputation included, as far as it is certain: a joint plan
    hardly shortens that, it fills the time between."""
    return (1 - _MISJUDGED) * sum(rank.busy_seconds for rank in plan.predictions.ranks) / plan.pp


def joint_plans(
    fits: Sequence[Fit],
    slower: Sequence[Fit],
    coarse: Coarse,
    space: Space,
    stop: threading.Event | None = None,
    wait_for_kernels: Callable[[], object] = lambda: None,
) -> Iterator[Fit]:
    """Yield plans of the joint search for the configurations of `fits`, the plans of the schedules, and of `slower`
    pipelines, which may not fit.

    Each is faster than all `fits` and those before it; there are none on devices of several kinds. Ctrl-C during a search
    sets `stop`, which ends this with what the search has found. `wait_for_kernels` is called before there is something to
    search. While the first configuration is searched, other processes search the others.
    """
    stop = stop or threading.Event()
    best = below_s = min((fit.step_seconds for fit in fits), default=0.0)
    searched = [
        fit
        for fit in top_configurations([*fits, *slower], best)
        if fit.plan.predictions.lower_bound_seconds < best and fit.entry.cluster.is_homogeneous
    ]
    if searched:
        wait_for_kernels()

    def work_out(fit: Fit, report: Callable[[str], None]) -> Plan | None:
        model_costs = coarse.model_costs(fit.entry.configuration.traced)
        configuration = _joint(fit.entry.configuration, fit.plan, space)
        searches = Searches(fit.plan, model_costs, configuration, fit.entry.cluster, below_s, report, stop)
        return _joint_plan(searches, coarse.job, coarse.reference, space.host_optimizer)

    # Copies of this process have no terminal.
    works = [partial(work_out, fit, silent if place else coarse.report) for place, fit in enumerate(searched)]
    with closing(at_once(works)) as plans:
        for fit, plan in zip(searched, plans, strict=True):
            if plan is not None and plan.predictions.step_seconds < best:
                best = plan.predictions.step_seconds
                yield Fit(on_devices_of(plan, fit.plan.cluster.load(), fit.entry.cluster), fit.entry)
            if stop.is_set():
                return


def _joint(configuration: Configuration, base: Plan, space: Space) -> Configuration:
    """Return `configuration`, of which the plan `base` was made, with its schedule to be searched."""
    return replace(
        configuration,
        schedule=JOINT,
        recompute="none" if configuration.recompute == "full" else configuration.recompute,
        chunks=None,
        layers_per_stage=None,
        offload=space.offload,
        headroom=0,
        host_optimizer=bool(base.host_optimizer),
    )


def _joint_plan(
    searches: Searches, job: Job, reference: ModelReference, host_optimizer: HostOptimizer
) -> Plan | None:
    """Return the plan within memory that leaves headroom for fragmentation, which only the replay of a plan shows."""
    limit, lost, missing = job.usable_bytes(searches.cluster.device), 0, 0
    for trial, margin in enumerate(_MARGINS):
        lost += max(missing, int(margin * limit))
        within = job.model_copy(update={"memory_limit": limit - lost}) if lost else job
        candidate = joint_candidate(searches, within, tight=trial > 0)
        if candidate is None:
            return None
        options = [
            option
            for option in ways_on_hosts(candidate, host_optimizer)
            if host_excess_bytes(option.staged) <= 0
        ]
        if not options:
            return None
        for option in options:
            plan = make_plan(option, searches.model_costs, reference)
            missing = plan.predictions.reserved_peak_bytes - limit
            if missing <= 0:
                return plan.model_copy(update={"job": job})
        missing += max(0, -candidate.excess_bytes)  # with less headroom the search would have the same result
    return None


@dataclass(frozen=True, eq=False)
class Searches:
    """The joint searches for one configuration, of which `base` is the best plan of a schedule.

    Each runs once, when it is first needed; the results are made to fit by recomputation and offload as the configuration
    allows.
    """

    base: Plan
    model_costs: RangeCosts
    configuration: Configuration
    cluster: Cluster
    below_s: float
    """Seconds that a useful step must stay below."""
    report: Callable[[str], None] = lambda stage: None
    stop: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def ends(self) -> Ints:
        """Ends of the pieces that take the place of layers."""
        return piece_ends(self.model_costs, self.configuration.pp)

    @cached_property
    def unlimited(self) -> JointResult | None:
        """The result with unlimited memory."""
        return self._result(
            replace(self._calibration, memory_bytes=[float("inf")] * self.base.pp), saves=False
        )

    @cached_property
    def limited(self) -> JointResult | None:
        """The result within memory; None where nothing fits."""
        return self._result(self._calibration, saves=self.configuration.saves)

    @cached_property
    def _calibration(self) -> Calibration:
        return calibrated(self.base, self.model_costs, self.configuration)

    def _result(self, calibration: Calibration, saves: bool) -> JointResult | None:
        configuration = self.configuration
        link_model = LinkModel(
            self.cluster,
            configuration.pp,
            configuration.dp * configuration.tp,
            self.base.job.uses_lanes(self.cluster),
        )
        problem = problem_of(
            self.model_costs, self.ends, configuration.num_microbatches, link_model, calibration, saves=saves
        )
        return _searched(problem, self.report, str(configuration), self.stop)


def joint_candidate(searches: Searches, job: Job, *, tight: bool = False) -> Candidate | None:
    """Return the fastest plan of `searches` within the memory of `job`, or None if none fits or is fast enough.

    Unless memory is `tight`, the search with unlimited memory is tried first, and that within memory if the result is fast
    enough and does not fit. Plans that do not fit recompute or offload as much as necessary.
    """
    fitting: list[Candidate] = []
    for limited in (True,) if tight else (False, True):
        if fitting and searches.stop.is_set():
            break
        result = searches.limited if limited else searches.unlimited
        if result is None:
            continue
        candidates = _candidates(result, searches, job)
        if not candidates:  # within memory they would be slower
            break
        best = _first_that_fits(candidates, searches, limited)
        fitting += [best] if best is not None else []
        if best is not None and set(best.memory_policy) == {"keep"}:
            break
    return min(fitting, key=lambda candidate: _makespan(candidate.staged), default=None)


def _candidates(result: JointResult, searches: Searches, job: Job) -> list[Candidate]:
    """Return the fastest plans of `result` that may be fast enough, with everything kept."""
    longest = searches.below_s
    if result.best.makespan_s > longest * (1 + _MISJUDGED):
        return []
    timed = sorted(_lines(result, searches, job), key=itemgetter(0))[:_JUDGED]
    return [
        candidate_of(searches.configuration, cuts, staged)
        for seconds, cuts, staged in timed
        if seconds < longest
    ]


def _lines(
    result: JointResult, searches: Searches, job: Job
) -> Iterator[tuple[float, tuple[int, ...], StagedModel]]:
    """Yield the pipelines of the plans worth judging, each with split and with whole backwards, with everything kept.

    Each comes with the cuts of its stages and the seconds of a batch, including the recomputation that the search chose.
    Plans are left out that would be too slow if their pieces were misjudged like those of the plans before them.
    """
    model_costs, configuration = searches.model_costs, searches.configuration
    misjudged = 1 - _MISJUDGED
    for plan in map(without_splits, _worth_judging(result)):
        if plan.makespan_s * misjudged > searches.below_s:
            continue
        kept = judged(plan.name, plan.problem, replace(plan.layout, recompute=()), plan.encoded)
        recompute_s = plan.makespan_s - kept.makespan_s
        cuts = cuts_of(plan, searches.ends)
        split = with_program(model_costs, configuration, cuts, plan.program, searches.cluster, job)
        seconds = _makespan(split) + recompute_s
        misjudged = max(misjudged, seconds / plan.makespan_s - _MISJUDGED_ALIKE)
        yield seconds, cuts, split
        if (whole := with_backwards(plan)) != plan.program:
            staged = under_program(split, configuration, cuts, whole)
            yield _makespan(staged) + recompute_s, cuts, staged


def _first_that_fits(candidates: Sequence[Candidate], searches: Searches, limited: bool) -> Candidate | None:
    """Return the first candidate that fits, or the first that fits with recomputation and offload, or None.

    Unless the search was `limited` to memory, those that need more than twice the memory are not tried: they would have to
    recompute almost everything.
    """
    kept = next((candidate for candidate in candidates if candidate.excess_bytes <= 0), None)
    if kept is not None or not searches.configuration.saves:
        return kept
    promising = [
        candidate
        for candidate in candidates
        if limited
        or candidate.excess_bytes < candidate.staged.job.usable_bytes(candidate.staged.cluster.device)
    ]
    fitted = (
        fitted_candidate(
            candidate,
            searches.model_costs,
            offload=searches.configuration.offload,
            below_s=searches.below_s,
        )
        for candidate in promising[:_SAVED]
    )
    return next((candidate for candidate in fitted if isinstance(candidate, Candidate)), None)


def calibrated(base: Plan, model_costs: RangeCosts, configuration: Configuration) -> Calibration:
    """Return what the predictions of `base` show beyond the costs of ranges."""
    stages, ranks = base.predictions.stages, base.predictions.ranks
    extra = 0.0
    kept_state = configuration.kept_state(model_costs, base.job.precision)
    state = [0.0] * base.pp
    for stage, rank in zip(stages, base.placement, strict=True):
        stage_s = stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        extra += (
            stage_s
            - stage.recompute_seconds
            - float(model_costs.seconds[stage.stop] - model_costs.seconds[stage.start])
        )
        state[rank] += float(kept_state[stage.stop] - kept_state[stage.start])
    limit = base.job.usable_bytes(base.cluster.load().device)
    limits = []
    for rank, state_bytes in zip(ranks, state, strict=True):
        other_bytes = rank.reserved_peak_bytes - state_bytes - sum(saved.num_bytes for saved in rank.saved)
        limits.append(max(1.0, limit - max(0.0, other_bytes)))
    return Calibration(max(0.0, extra) / (3 * len(stages)), limits, kept_state)


def _searched(
    problem: JointProblem, report: Callable[[str], None], what: str, stop: threading.Event | None
) -> JointResult | None:
    """Return the result of the joint search, or None where no plan fits the memory of `problem`."""

    def report_progress(best_s: float, bound_s: float) -> None:
        report(f"{what}: best batch {format_seconds(best_s)}, none below {format_seconds(bound_s)}")

    wanted = 3 * problem.layers.num_layers * problem.num_microbatches // _ACTIONS_PER_ROUND
    rounds = _MOST_ROUNDS if problem.recomputing else min(max(wanted, _FEWEST_ROUNDS), _MOST_ROUNDS)
    try:
        return search(problem, Effort(rounds=rounds, gap=_CLOSE_ENOUGH), report=report_progress, stop=stop)
    except PlanError:
        return None


def _worth_judging(result: JointResult) -> Iterator[JointPlan]:
    """Yield the best plans with different stages, regardless of recomputation, and the best of the baselines."""
    seen = set()
    for plan in (result.best, *result.runners_up):
        if _stages(plan) not in seen and len(seen) < _JUDGED:
            seen.add(_stages(plan))
            yield plan
    baseline = next((plan for plan in result.baselines if plan.fits), None)
    if baseline is not None and _stages(baseline) not in seen:
        yield baseline


def _stages(plan: JointPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.layout.ends, plan.layout.rank_of_stage


def _makespan(staged: StagedModel) -> float:
    return run_timeline(staged).makespan_s
