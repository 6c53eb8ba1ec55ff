"""The joint search: baselines first, then annealing over layouts and rules on every core, round by round."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from stagewright.arrays import Ints
from stagewright.errors import PlanError
from stagewright.planning.joint.anneal import MARGIN, JointState, anneal, gather, makespan_of
from stagewright.planning.joint.baselines import baselines
from stagewright.planning.joint.bounds import Bound, lower_bound
from stagewright.planning.joint.layout import Layout, build_stages
from stagewright.planning.joint.moves import improve_order
from stagewright.planning.joint.packing import pack
from stagewright.planning.joint.plan import DeadlinePolicy, JointPlan, encode_order, judged, scheduled
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.joint.starts import starts
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of, window_of
from stagewright.schedule.list_scheduler.terms import Order, Rule, Stages

Report = Callable[[float, float], None]
"""Called with the best makespan so far and the lower bound, in seconds."""

_TASKS_PER_ROUND = 2
"""Tasks per round, independent of the number of cores, so that a search has the same result on every machine."""
_CHUNK, _AHEAD = 8, 2
"""Number of starts that a task times, and of tasks before it whose times it does not know."""
_WORK_PER_ROUND = 3_000_000
"""Actions that one task schedules in a round: a tenth to a quarter of a second."""
_OPENING = 10
"""Rounds' worth of actions that may be spent on starts that differ in what ranks recompute."""
_CALL = 200
"""Fixed cost of a schedule, in actions."""
_SHARES = (0.0003, 0.001, 0.0001, 0.003)
"""Losses accepted at the start of a round, as shares of the makespan; each round takes the next."""
_JUDGED = 4
"""Number of plans that are simulated at the end."""
_DEADLINE_SCALES = (0.0, 1.5, 3.0, 5.0)
_COARSE = 0.6
"""Share of a search during which large batches are shortened."""
_POLISH = 0.75
"""Share of a search after which the orders themselves are improved."""
_CHEAPER = 4
"""Number of orders that are timed in the time of one list schedule."""
_GATHERINGS = 3
"""Number of times that transfers of the best states are reduced at the end."""
_EXACT = 2e-6  # the precision of the packing bound


@dataclass(frozen=True)
class Effort:
    """The effort of a search: it ends after `seconds` or, for results that repeat exactly, after `rounds`.

    `pool` states are annealed in turn. `gap` ends the search once the best is that close to the bound. `num_workers` threads
    run the tasks of a round; their number changes only how long rounds take.
    """

    seconds: float = 10.0
    rounds: int | None = None
    pool: int = 6
    gap: float = 0.0
    num_workers: int = field(default_factory=lambda: min(_TASKS_PER_ROUND, os.cpu_count() or 1))


@dataclass(frozen=True, eq=False)
class JointResult:
    """The result of a joint search: the best plan, what it was compared with, and a lower bound."""

    best: JointPlan
    bound: Bound
    baselines: tuple[JointPlan, ...]
    runners_up: tuple[JointPlan, ...]
    num_rounds: int
    seconds: float

    @property
    def gap(self) -> float:
        """Relative difference between the best plan and the bound."""
        return self.bound.gap(self.best.makespan_s)


@dataclass(frozen=True, eq=False)
class Timed:
    """A state, with the (estimated) makespan of its list schedule or of a complete `order` of every rank's actions."""

    makespan_s: float
    state: JointState
    order: Order | None = None

    @property
    def layout(self) -> Layout:
        cuts = np.flatnonzero(self.state.is_cut).tolist()
        return Layout.of_layers(self.state.rank_of_layer, cuts, self.state.table_of_rank)

    @property
    def num_transfers(self) -> int:
        """Transfers between ranks, as in `Layout.num_transfers`."""
        return int(np.count_nonzero(np.diff(self.state.rank_of_layer)))


def search(
    problem: JointProblem,
    effort: Effort | None = None,
    *,
    seed: int = 0,
    report: Report | None = None,
    stop: threading.Event | None = None,
) -> JointResult:
    """Return the best plan of `problem` that fits the memory of every rank.

    It is never worse than a baseline that fits. The same seed and number of rounds give the same result. The search ends
    early, with the best so far, when `stop` is set, when interrupted from the keyboard, or when the bound is reached.

    Raises:
        PlanError: no plan fits the memory.
    """
    return _Search(problem, effort or Effort(), seed, report, stop or threading.Event()).run()


class _Search:
    """A search in progress: a pool of layouts, best first."""

    def __init__(
        self, problem: JointProblem, effort: Effort, seed: int, report: Report | None, stop: threading.Event
    ) -> None:
        self.problem, self.effort, self.report, self.stop = problem, effort, report, stop
        self.began = time.monotonic()
        self.rng = np.random.default_rng(seed)
        self.pool: list[Timed] = []
        self.ordered: list[Timed] = []
        self.num_rounds = 0
        full = problem.num_microbatches
        short = min(full, max(4 * problem.num_ranks, 16))
        self.batch = (short, full - short)

    def run(self) -> JointResult:
        with ThreadPoolExecutor(self.effort.num_workers) as workers:
            packing = workers.submit(pack, self.problem)
            self.baselines = tuple(sorted(baselines(self.problem), key=lambda plan: plan.makespan_s))
            self.packing = packing.result()
            self.bound = lower_bound(self.problem, self.packing)
            try:
                self._open(workers)
                while not self._is_over():
                    self._round(workers)
            except KeyboardInterrupt:
                self.stop.set()
            self._use_whole_batch(workers)
            for _ in range(_GATHERINGS):
                shortest = [timed for timed in self.pool if timed.makespan_s <= self._best_s() * (1 + MARGIN)]
                self._gather(shortest[:_TASKS_PER_ROUND], workers)
        return self._result()

    def _open(self, workers: ThreadPoolExecutor) -> None:
        """Fill the pool with the starts under all rules."""
        fitting = (plan.layout for plan in self.baselines if plan.fits)
        layouts = dict.fromkeys([*starts(self.problem, self.packing), *fitting])
        shifts = np.zeros((4, self.problem.layers.num_layers))
        actions = 3 * self.problem.layers.num_layers * self.batch[0]
        most = _OPENING * _WORK_PER_ROUND // (len(layouts) * len(_DEADLINE_SCALES) * (_CALL + actions))
        states = [
            self._state(layout, DeadlinePolicy(_rule(deadline_scale), shifts), recompute)
            for layout in layouts
            for deadline_scale in _DEADLINE_SCALES
            for recompute in _recompute_tables(self.problem, most)
        ]
        states += [
            self._state(plan.layout, plan.policy) for plan in self.baselines if plan.policy is not None
        ]
        self._keep(self._timed(states, workers))

    def _state(self, layout: Layout, policy: DeadlinePolicy, recompute: Ints | None = None) -> JointState:
        """Return the state of a layout; `recompute` has the tables of the ranks in the order of their first layers."""
        ranks = layout.rank_of_layer()
        tables = layout.table_of_rank(self.problem.num_ranks)
        if recompute is not None:
            tables[list(dict.fromkeys(ranks.tolist()))] = recompute
        return JointState(ranks, layout.is_cut(), tables, policy.rule, policy.shifts)

    def _timed(self, states: Sequence[JointState], workers: ThreadPoolExecutor) -> list[Timed]:
        """Return the states with their makespans, infinite where far from the best.

        The best is taken over the states of tasks up to `_AHEAD` before, which are waited for, not over those that other
        threads happen to have timed.
        """
        best = self.pool[0].makespan_s if self.pool else np.inf
        tasks: list[Future[list[Timed]]] = []
        for start in range(0, len(states), _CHUNK):
            if len(tasks) >= _AHEAD:
                best = min(best, *(timed.makespan_s for timed in tasks[-_AHEAD].result()))
            tasks.append(workers.submit(self._timed_within, states[start : start + _CHUNK], 1.2 * best))
        return [timed for task in tasks for timed in task.result()]

    def _timed_within(self, states: Sequence[JointState], limit_s: float) -> list[Timed]:
        return [Timed(makespan_of(state, self.problem.costs, self.batch, limit_s), state) for state in states]

    def _is_over(self) -> bool:
        if self.stop.is_set() or not self.pool:
            return True
        if self._best_s() <= self.bound.seconds * (1 + self.effort.gap + _EXACT):
            return True
        return self._done() >= 1

    def _best_s(self) -> float:
        return min((candidate.makespan_s for candidate in (*self.pool, *self.ordered)), default=np.inf)

    def _done(self) -> float:
        """Return the fraction of the effort that is spent."""
        if self.effort.rounds is not None:
            return self.num_rounds / self.effort.rounds if self.effort.rounds else 1.0
        return (time.monotonic() - self.began) / max(1e-9, self.effort.seconds)

    def _round(self, workers: ThreadPoolExecutor) -> None:
        """Anneal states of the pool or, towards the end, improve orders; one per task."""
        if self._done() >= _COARSE:
            self._use_whole_batch(workers)
        if self._done() >= _POLISH:
            self._polish(workers)
        else:
            self._anneal(workers)
        self.num_rounds += 1
        if self.report is not None:
            self.report(self._best_s(), self.bound.seconds)

    def _anneal(self, workers: ThreadPoolExecutor) -> None:
        """Anneal states of the pool in turn, and add the results to the pool."""
        steps = max(20, _WORK_PER_ROUND // (_CALL + 3 * self.problem.layers.num_layers * self.batch[0]))
        tasks = []
        for number in range(_TASKS_PER_ROUND):
            turn = self.num_rounds * _TASKS_PER_ROUND + number
            state = self.pool[turn % len(self.pool)].state
            share = _SHARES[turn // len(self.pool) % len(_SHARES)]
            seed = int(self.rng.integers(1 << 31))
            tasks.append(workers.submit(anneal, state, self.problem.costs, self.batch, steps, share, seed))
        self._keep([Timed(*task.result()) for task in tasks])

    def _gather(self, candidates: Sequence[Timed], workers: ThreadPoolExecutor) -> None:
        """Add layouts with fewer transfers and no longer makespan than the candidates to the pool."""
        if self.stop.is_set():
            return
        actions = 3 * self.problem.layers.num_layers * self.batch[0]
        steps = max(100, _WORK_PER_ROUND // (_CALL + actions))
        tasks = []
        for timed in candidates:
            limit, seed = timed.makespan_s * (1 + MARGIN), int(self.rng.integers(1 << 31))
            task = workers.submit(gather, timed.state, self.problem.costs, self.batch, limit, steps, seed)
            tasks.append((timed.state, task))
        gathered = []
        for state, task in tasks:
            makespan, ranks, cuts = task.result()
            gathered.append(Timed(makespan, state._replace(rank_of_layer=ranks, is_cut=cuts)))
        self._keep(gathered)

    def _polish(self, workers: ThreadPoolExecutor) -> None:
        """Improve the orders of the pool in turn."""
        if not self.ordered:
            self._gather(self.pool, workers)
            self.ordered = list(workers.map(self._order_of, self.pool))
        actions = 3 * self.problem.layers.num_layers * self.problem.num_microbatches
        steps = max(100, _CHEAPER * _WORK_PER_ROUND // (_CALL + actions))
        tasks = []
        for number in range(min(_TASKS_PER_ROUND, len(self.ordered))):
            place = (self.num_rounds * _TASKS_PER_ROUND + number) % len(self.ordered)
            share = _SHARES[int(self.rng.integers(len(_SHARES)))]
            seed = int(self.rng.integers(1 << 31))
            ordered, bound = self.ordered[place], self.bound.seconds * (1 + _EXACT)
            task = workers.submit(
                improve_order, self._stages(ordered.state), self.problem.num_microbatches, ordered.order, steps,
                share, bound, seed,
            )  # fmt: skip
            tasks.append((place, task))
        for place, task in tasks:
            makespan, order = task.result()
            if makespan < self.ordered[place].makespan_s:
                self.ordered[place] = Timed(makespan, self.ordered[place].state, order)

    def _order_of(self, timed: Timed) -> Timed:
        """Return the state with the order of its list schedule."""
        stages, rule = self._stages(timed.state), timed.state.rule
        window, deadlines = window_of(stages, rule.depth), deadlines_of(stages, rule, timed.state.shifts)
        order = list_schedule(stages, self.problem.num_microbatches, rule, window, deadlines, np.inf)[1]
        return replace(timed, order=order)

    def _stages(self, state: JointState) -> Stages:
        return build_stages(state.rank_of_layer, state.is_cut, state.table_of_rank, self.problem.costs)

    def _use_whole_batch(self, workers: ThreadPoolExecutor) -> None:
        """Time all microbatches from now on."""
        if self.batch[1]:
            self.batch = (self.problem.num_microbatches, 0)
            states, self.pool = [timed.state for timed in self.pool], []
            self._keep(self._timed(states, workers))

    def _keep(self, candidates: list[Timed]) -> None:
        """Keep the best of the pool and the candidates, each makespan and layout once."""
        distinct: dict[tuple[float, bytes], Timed] = {}
        for timed in _shortest_first([*self.pool, *candidates]):
            if np.isfinite(timed.makespan_s):
                distinct.setdefault((round(timed.makespan_s, 9), timed.state.rank_of_layer.tobytes()), timed)
        self.pool = list(distinct.values())[: self.effort.pool]

    def _result(self) -> JointResult:
        fitting = [plan for plan in self.baselines if plan.fits]
        judged_plans = map(self._judged, _shortest_first([*self.ordered, *self.pool])[:_JUDGED])
        plans = [*(plan for plan in judged_plans if plan is not None and plan.fits), *fitting]
        if not plans:
            raise PlanError(
                "no plan fits the memory of the ranks: give them more, use more ranks, or smaller microbatches"
            )
        plans.sort(key=lambda plan: plan.makespan_s)
        best = _with_fewest_transfers(plans)
        return JointResult(
            best, self.bound, self.baselines, tuple(plan for plan in plans if plan is not best),
            self.num_rounds, time.monotonic() - self.began,
        )  # fmt: skip

    def _judged(self, timed: Timed) -> JointPlan | None:
        policy = DeadlinePolicy(timed.state.rule, timed.state.shifts)
        if timed.order is None:
            return scheduled("joint search", self.problem, timed.layout, policy)
        program = encode_order("joint search", timed.layout, self._stages(timed.state), timed.order)
        return judged("joint search", self.problem, timed.layout, program, policy)


def _shortest_first(candidates: Iterable[Timed]) -> list[Timed]:
    """Return the candidates by makespan, and those as short as the shortest by their transfers."""
    candidates = list(candidates)
    equal_s = min((timed.makespan_s for timed in candidates), default=np.inf) * (1 + MARGIN)
    return sorted(candidates, key=lambda timed: (max(timed.makespan_s, equal_s), timed.num_transfers))


def _with_fewest_transfers(plans: Sequence[JointPlan]) -> JointPlan:
    """Return the plan with the fewest transfers of those that are as short as the first."""
    equal = [plan for plan in plans if plan.makespan_s <= plans[0].makespan_s * (1 + MARGIN)]
    return min(equal, key=lambda plan: (plan.layout.num_transfers, plan.layout.num_stages))


def _recompute_tables(problem: JointProblem, most_rows: int) -> list[Ints]:
    """Return tables of ranks to start with, at most `most_rows` or three: late ranks hold fewer microbatches and may
    recompute less."""
    most = len(problem.recomputing)
    rows = (
        np.linspace(first, share * first, problem.num_ranks).round().astype(np.int64)
        for first in range(most + 1)
        for share in (1.0, 0.5, 0.0)
    )
    tables = [np.array(row) for row in dict.fromkeys(tuple(row.tolist()) for row in rows)]
    return tables[:: -ceil(len(tables) / max(3, most_rows))]


def _rule(deadline_scale: float) -> Rule:
    return Rule(1, False, False, np.inf, 0.0, UNLIMITED, False, deadline_scale)
