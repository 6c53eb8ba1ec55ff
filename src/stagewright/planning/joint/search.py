"""The joint search: baselines first, then annealing over layouts and rules on every core, round by round."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from stagewright.errors import PlanError
from stagewright.planning.joint.anneal import NO_BACKLOG, Tables, anneal, makespan_of
from stagewright.planning.joint.baselines import baselines
from stagewright.planning.joint.bounds import Bound, lower_bound
from stagewright.planning.joint.kernels import Rule
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.plan import JointPlan, scheduled
from stagewright.planning.joint.problem import Problem
from stagewright.planning.joint.starts import starts

Report = Callable[[float, float], None]
"""Told the best makespan so far and the lower bound."""

_WORK_PER_ROUND = 1_500_000
"""Actions that one core schedules in a round: a tenth to a quarter of a second."""
_SHARES = (0.01, 0.002, 0.03)
"""Losses accepted at the start of a round, as shares of the makespan; each round takes the next."""
_GOOD_ENOUGH = 1e-9

START_RULES = tuple(
    Rule(forward_next, False, False, depth, share, NO_BACKLOG, False)
    for forward_next, depth, share in product((True, False), (np.inf, 1.5), (0.0, 0.5))
)


@dataclass(frozen=True)
class Effort:
    """When a search ends: after so many seconds or, for results that repeat exactly, after so many rounds.

    `pool` states are annealed in turn. `gap` ends the search once the best is that close to the bound.
    """

    seconds: float = 10.0
    rounds: int | None = None
    pool: int = 6
    gap: float = 0.0
    num_workers: int = field(default_factory=lambda: min(2, os.cpu_count() or 1))


@dataclass(frozen=True, eq=False)
class Found:
    """The best plan, what it was compared with, and the bound that nothing can beat."""

    best: JointPlan
    bound: Bound
    baselines: tuple[JointPlan, ...]
    runners_up: tuple[JointPlan, ...]
    num_rounds: int
    seconds: float

    @property
    def gap(self) -> float:
        """By which share of the bound the best plan is longer than it."""
        return self.bound.gap(self.best.makespan_s)


@dataclass(frozen=True, eq=False)
class State:
    """A layout and rule with the makespan of their list schedule."""

    makespan_s: float
    ranks: np.ndarray
    cuts: np.ndarray
    rule: Rule

    @property
    def layout(self) -> Layout:
        return Layout.of_layers(self.ranks, np.flatnonzero(self.cuts).tolist())


def search(
    problem: Problem,
    effort: Effort | None = None,
    *,
    seed: int = 0,
    report: Report | None = None,
    stop: threading.Event | None = None,
) -> Found:
    """The best plan of `problem` that fits the memory of every rank.

    Never worse than a baseline that fits. One seed and one number of rounds give one result. Ends early when
    `stop` is set, when interrupted from the keyboard, or when the bound is reached, with the best so far.

    Raises:
        PlanError: no plan fits the memory.
    """
    return _Search(problem, effort or Effort(), seed, report, stop or threading.Event()).run()


class _Search:
    """State of a search: a pool of layouts, best first."""

    def __init__(
        self, problem: Problem, effort: Effort, seed: int, report: Report | None, stop: threading.Event
    ) -> None:
        self.problem, self.effort, self.report, self.stop = problem, effort, report, stop
        self.began = time.monotonic()
        self.rng = np.random.default_rng(seed)
        self.tables: Tables = (
            problem.layers.sums,
            problem.transfer_s,
            problem.speed,
            problem.memory_bytes,
            problem.overhead_s,
        )
        self.bound = lower_bound(problem)
        self.baselines = tuple(sorted(baselines(problem), key=lambda each: each.makespan_s))
        self.pool: list[State] = []
        self.num_rounds = 0

    def run(self) -> Found:
        try:
            self._open()
            with ThreadPoolExecutor(self.effort.num_workers) as workers:
                while not self._is_over():
                    self._round(workers)
        except KeyboardInterrupt:
            self.stop.set()
        return self._found()

    def _open(self) -> None:
        """Fill the pool with the starts under all rules."""
        states: list[State] = []
        layouts = [*starts(self.problem), *(each.layout for each in self.baselines if each.fits)]
        for layout in dict.fromkeys(layouts):
            ranks, cuts = layout.rank_of_layer(), layout.is_cut()
            best = min((self._timed(ranks, cuts, rule) for rule in START_RULES), key=_length)
            states.append(best)
        self._keep(states)

    def _timed(self, ranks: np.ndarray, cuts: np.ndarray, rule: Rule) -> State:
        makespan = makespan_of(ranks, cuts, rule, self.tables, self.problem.num_microbatches, np.inf)
        return State(makespan, ranks, cuts, rule)

    def _is_over(self) -> bool:
        if (
            self.stop.is_set()
            or not self.pool
            or self._best_s() <= self.bound.seconds * (1 + self.effort.gap + _GOOD_ENOUGH)
        ):
            return True
        if self.effort.rounds is not None:
            return self.num_rounds >= self.effort.rounds
        return time.monotonic() - self.began >= self.effort.seconds

    def _best_s(self) -> float:
        return self.pool[0].makespan_s

    def _round(self, workers: ThreadPoolExecutor) -> None:
        """Anneal one state of the pool on every core; what they find joins the pool."""
        layers, M = self.problem.layers.num_layers, self.problem.num_microbatches
        steps = max(20, _WORK_PER_ROUND // (3 * layers * M))
        tasks = []
        for worker in range(self.effort.num_workers):
            state = self.pool[(self.num_rounds * self.effort.num_workers + worker) % len(self.pool)]
            share = _SHARES[(self.num_rounds + worker) % len(_SHARES)]
            seed = int(self.rng.integers(1 << 31))
            tasks.append(
                workers.submit(
                    anneal, state.ranks, state.cuts, state.rule, self.tables, M, steps, share, seed
                )
            )
        self._keep([State(*task.result()) for task in tasks])
        self.num_rounds += 1
        if self.report is not None:
            self.report(self._best_s(), self.bound.seconds)

    def _keep(self, states: list[State]) -> None:
        """The best of the pool and `states`, each makespan and layout once."""
        known: dict[tuple[float, bytes], State] = {}
        for state in sorted([*self.pool, *states], key=_length):
            if np.isfinite(state.makespan_s):
                known.setdefault((round(state.makespan_s, 9), state.ranks.tobytes()), state)
        self.pool = list(known.values())[: self.effort.pool]

    def _found(self) -> Found:
        fitting = [each for each in self.baselines if each.fits]
        made = [scheduled("joint search", self.problem, state.layout, state.rule) for state in self.pool]
        plans = [*(each for each in made if each is not None and each.fits), *fitting]
        if not plans:
            raise PlanError(
                "no plan fits the memory of the ranks: give them more, use more ranks, or smaller microbatches"
            )
        plans.sort(key=lambda each: each.makespan_s)
        return Found(
            plans[0], self.bound, self.baselines, tuple(plans[1:]),
            self.num_rounds, time.monotonic() - self.began,
        )  # fmt: skip


def _length(state: State) -> float:
    return state.makespan_s
