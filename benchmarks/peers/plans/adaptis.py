"""AdaPtis' tuner: find the bottleneck, tune the phase that matches it, verify, roll back what does not help.

A reconstruction. The control rule is the one reported for the third version of the paper; the moves are
those of the published repositories (layers from busy to idle devices, swaps of stages between devices,
dispersed stages, other numbers of stages, weight gradients earlier or later); within each evaluation work is
ordered by the published list scheduler. Where the chosen phase has no move that helps, the next is tried,
as otherwise equal layers end the search at once.

Source: Guo et al. 2025, "AdaPtis" (arXiv 2509.23722); github.com/guojihu-hana/PipelineSimulator and SimPipe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from stagewright.arrays import Floats
from stagewright.errors import PlanError
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.plan import DeadlinePolicy, JointPlan, scheduled
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.joint.starts import balanced, even
from stagewright.schedule.list_scheduler.priorities import UNLIMITED
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.schedule.placement import Placement, linear, loop

ADAPTIS = Rule(1, False, False, np.inf, 0.0, UNLIMITED, True, 0.0)
"""AdaPtis' list scheduler. Source: github.com/guojihu-hana/SimPipe."""

PARTITION, PLACEMENT, SCHEDULE = "partition", "placement", "schedule"


@dataclass(frozen=True, eq=False)
class Tuned:
    """The tuner's best plan, how many plans it simulated, and the phase of every move that it kept."""

    best: JointPlan
    num_simulated: int
    kept: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Bubbles:
    """Idle seconds per rank: before its first and after its last work, and in between."""

    boundary_s: Floats
    residual_s: Floats

    @property
    def all_s(self) -> Floats:
        return self.boundary_s + self.residual_s


def tune(problem: JointProblem, max_simulated: int = 400, max_seconds: float = np.inf) -> Tuned:
    """Tune from even stages, one per rank, until no phase helps, `max_simulated` plans were tried or the
    time is up.

    Raises:
        PlanError: the even partition does not fit the memory.
    """
    return _Tuner(problem, max_simulated, time.monotonic() + max_seconds).run()


def bubbles_of(plan: JointPlan) -> Bubbles:
    """Where the ranks of a plan idle."""
    timeline = plan.timeline
    slices = [timeline.encoded.rank_slice(rank) for rank in range(timeline.num_ranks)]
    first = np.array([timeline.start_s[part].min() for part in slices])
    last = np.array([timeline.end_s[part].max() for part in slices])
    boundary = first + timeline.makespan_s - last
    return Bubbles(boundary, timeline.idle_s - boundary)


def phases(problem: JointProblem, bubbles: Bubbles) -> tuple[str, ...]:
    """The phases in the order in which the bottleneck calls for them.

    Ranks whose idle time differs by more than the smallest layer call for another partition; else more idle
    time at the ends than in between calls for another placement, and otherwise for another schedule.
    """
    layers = problem.layers
    smallest = problem.num_microbatches * float(layers.seconds.min())
    idle = bubbles.all_s
    if idle.max() - idle.min() > smallest:
        return PARTITION, PLACEMENT, SCHEDULE
    if bubbles.boundary_s.sum() > bubbles.residual_s.sum():
        return PLACEMENT, SCHEDULE, PARTITION
    return SCHEDULE, PLACEMENT, PARTITION


class _Tuner:
    def __init__(self, problem: JointProblem, max_simulated: int, until: float) -> None:
        self.problem, self.max_simulated, self.until = problem, max_simulated, until
        self.num_simulated = 0
        self.tried: set[tuple[Layout, Rule]] = set()
        self.kept: list[str] = []

    def run(self) -> Tuned:
        best = self._simulated(even(self.problem, linear(self.problem.num_ranks)), ADAPTIS)
        if best is None:
            raise PlanError("the even partition does not fit the memory: give the ranks more")
        while True:
            better = self._better(best)
            if better is None:
                return Tuned(best, self.num_simulated, tuple(self.kept))
            best = better

    def _better(self, best: JointPlan) -> JointPlan | None:
        """The first proposal that is shorter, from the phase the bottleneck calls for or the ones after."""
        bubbles = bubbles_of(best)
        assert best.policy is not None
        for phase in phases(self.problem, bubbles):
            for layout, rule in self._proposals(phase, best.layout, best.policy.rule, bubbles):
                if self.num_simulated >= self.max_simulated or time.monotonic() > self.until:
                    return None
                plan = self._simulated(layout, rule)
                if plan is not None and plan.makespan_s < best.makespan_s * (1 - 1e-9):
                    self.kept.append(phase)
                    return plan
        return None

    def _proposals(
        self, phase: str, layout: Layout, rule: Rule, bubbles: Bubbles
    ) -> Iterator[tuple[Layout, Rule]]:
        if phase == PARTITION:
            yield from ((each, rule) for each in moved_layers(self.problem, layout, bubbles))
        elif phase == PLACEMENT:
            yield from ((each, rule) for each in other_stage_counts(self.problem, layout))
            yield from ((each, rule) for each in other_placements(self.problem, layout, bubbles))
        else:
            yield from ((layout, each) for each in other_orders(rule))

    def _simulated(self, layout: Layout, rule: Rule) -> JointPlan | None:
        """The plan, unless it was tried before or does not fit the memory."""
        if (layout, rule) in self.tried:
            return None
        self.tried.add((layout, rule))
        self.num_simulated += 1
        policy = DeadlinePolicy.of(rule, self.problem.layers.num_layers)
        plan = scheduled("AdaPtis' tuner", self.problem, layout, policy)
        return plan if plan is not None and plan.fits else None


def moved_layers(problem: JointProblem, layout: Layout, bubbles: Bubbles) -> Iterator[Layout]:
    """One layer from a stage of a busy rank to a stage of an idle one, the stages in between shifted; ranks
    by their work, then by their bubbles."""
    rank_of_layer = layout.rank_of_layer()
    load = np.bincount(rank_of_layer, problem.layers.seconds, problem.num_ranks) / problem.speed
    for order in (np.argsort(-load), np.argsort(bubbles.all_s)):
        half = max(1, len(order) // 2)
        for donor, receiver in product(order[:half], order[::-1][:half]):
            yield from _moved(layout, int(donor), int(receiver))


def _moved(layout: Layout, donor: int, receiver: int) -> Iterator[Layout]:
    if donor == receiver:
        return
    pairs = product(layout.placement.stages_of(donor), layout.placement.stages_of(receiver))
    for source, target in sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))[:2]:
        sizes = list(layout.sizes)
        if sizes[source] > 1:
            sizes[source] -= 1
            sizes[target] += 1
            ends = np.cumsum(sizes).tolist()
            yield Layout(tuple(ends), layout.rank_of_stage)


def other_stage_counts(problem: JointProblem, layout: Layout) -> Iterator[Layout]:
    """More or fewer stages of equal time, round the ranks; at last one layer per stage."""
    num_ranks = problem.num_ranks
    for num_stages in (layout.num_stages + num_ranks, 2 * layout.num_stages, layout.num_stages - num_ranks):
        chunks = num_stages // num_ranks
        if chunks >= 1 and chunks * num_ranks <= problem.layers.num_layers:
            other = balanced(problem, loop(num_ranks, chunks))
            if other is not None:
                yield other
    yield single_layers(problem)


def single_layers(problem: JointProblem) -> Layout:
    """Every layer a stage, in ascending order of time to the rank with least work so far."""
    load = np.zeros(problem.num_ranks)
    ranks = np.empty(problem.layers.num_layers, np.int64)
    for layer in np.argsort(problem.layers.seconds, kind="stable"):
        rank = int(np.argmin(load))
        ranks[layer] = rank
        load[rank] += problem.layers.seconds[layer] / problem.speed[rank]
    return Layout(tuple(range(1, len(ranks) + 1)), tuple(ranks.tolist()))


def other_placements(problem: JointProblem, layout: Layout, bubbles: Bubbles) -> Iterator[Layout]:
    """Neighbour stages dispersed, then a stage of a busy rank swapped for the next shorter one of an idle
    rank, then single stages moved there."""
    ranks = list(layout.rank_of_stage)
    by_idle = np.argsort(bubbles.all_s)
    for stage in range(1, len(ranks)):
        if ranks[stage] == ranks[stage - 1]:
            yield _with_rank(layout, {stage: int(by_idle[-1])})
    time = np.concatenate([[0.0], np.cumsum(problem.layers.seconds)])
    seconds = np.diff(time[[0, *layout.ends]])
    half = max(1, len(by_idle) // 2)
    for busy, idle in product(by_idle[:half], by_idle[::-1][:half]):
        if busy == idle:
            continue
        for stage in sorted(layout.placement.stages_of(int(busy)), key=lambda each: seconds[each]):
            shorter = [s for s in layout.placement.stages_of(int(idle)) if seconds[s] < seconds[stage]]
            if shorter:
                other = max(shorter, key=lambda each: seconds[each])
                yield _with_rank(layout, {stage: int(idle), other: int(busy)})
                break
        yield _with_rank(layout, {layout.placement.stages_of(int(busy))[0]: int(idle)})


def _with_rank(layout: Layout, changed: dict[int, int]) -> Layout:
    """The layout with other ranks for some stages; itself where a rank would be left without a stage."""
    ranks = list(layout.rank_of_stage)
    for stage, rank in changed.items():
        ranks[stage] = rank
    if len(set(ranks)) < layout.placement.num_ranks:
        return layout
    return Layout(layout.ends, Placement(tuple(ranks)).rank_of_stage)


def other_orders(rule: Rule) -> Iterator[Rule]:
    """Weight gradients later or earlier, transfers given time to hide or not, fewer forwards at first."""
    yield rule._replace(share=1.0)
    yield rule._replace(share=0.5)
    yield rule._replace(max_deferred=2)
    yield rule._replace(holds_back=not rule.holds_back)
    yield rule._replace(forward_next=1 - rule.forward_next)
    for depth in (2.0, 1.5, 1.0):
        yield rule._replace(depth=depth)
