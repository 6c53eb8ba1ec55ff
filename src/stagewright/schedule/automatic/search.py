"""Search for a short schedule with split backwards: many starting orders, the best improved by moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.errors import ScheduleError
from stagewright.schedule.action import Kind
from stagewright.schedule.automatic.limits import one_microbatch, shortest_possible, smaller_limits
from stagewright.schedule.automatic.orders import (
    BestOrders,
    Patterns,
    choose_patterns,
    choose_starts,
    improve,
)
from stagewright.schedule.automatic.patterns import patterns
from stagewright.schedule.builders.linear import zb_h1, zb_h2
from stagewright.schedule.builders.v_shaped import zb_v
from stagewright.schedule.list_scheduler.priorities import UNLIMITED
from stagewright.schedule.list_scheduler.stage_times import KINDS, StageTimes, program_of, stages_of
from stagewright.schedule.list_scheduler.terms import TINY, Order, Stages
from stagewright.schedule.placement import Placement, linear, v
from stagewright.schedule.program import Program

FILL_RULES = np.array(
    [(share, levels) for levels, share in product((False, True), (0.0, 0.5, 1.0))], np.float64
)
"""Rows are `FillRule`s."""
WINDOWS = (1.0, 1.5, 2.0, 3.0)
NUM_BEST_ORDERS = 4
START_SHARES = (0.0, 0.0003, 0.001, 0.003)
"""Fraction of its length by which an order may temporarily become longer, in each turn; see `improve`. The best orders take
turns."""
PATIENCE = 3
"""The turn in which an order may not become longer ends after this many times the moves of another turn without a gain."""
MOST_TURNS = 8
"""Its maximum number of moves, in multiples of another turn."""
ACTIONS_PER_MOVE = 30_000
"""Actions timed per unit of `num_moves`: short orders get more moves than long ones, so that they take equally long."""
MOVES_PER_ACTION = 0.15
"""Maximum number of moves of an order, per action and unit of `num_moves`: very short ones do not need more."""
WORTH_A_TRY = 1.03
"""Maximum length of a start to be improved, relative to the best start under the same limit."""
NEARLY = 1.005
"""Maximum length of the best start under a limit, relative to the best order so far, for any start to be improved."""


@dataclass(frozen=True)
class SearchSettings:
    """The objective and the effort of a search; the same seed gives the same result."""

    by_span: bool = False
    """Whether to minimise the longest span of a rank from its first to its last computation, not the makespan."""
    num_moves: int = 4000
    """Moves of an order of 7,500 actions; shorter ones get more."""
    num_patterns: int = 400
    good_enough_s: float = 0.0
    """The search ends early when it reaches this time."""
    seed: int = 0


def automatic(
    placement: Placement,
    num_microbatches: int,
    times: StageTimes,
    memory_limit: float | Floats,
    settings: SearchSettings = SearchSettings(),
    *,
    name: str = "zb-auto",
) -> Program:
    """Search for a short schedule with split backwards within `memory_limit` on every rank.

    Minimises the makespan, or with `by_span` the longest span of a rank (the time of a batch when batches follow each other
    without a barrier). Starts from the known schedules, list schedules and `num_patterns` repeated patterns, times each with
    weight gradients filled in under six rules, and improves the best four by small moves, continuing while they gain. Both
    numbers may be lowered when many schedules are compared.

    More memory hardly ever makes the result longer: the search is repeated under every smaller limit, in steps of half a
    microbatch's memory, and the best is kept. It skips limits under which no start comes near the best so far, so
    occasionally it misses an order that it finds with a smaller limit. (Limits between two steps may differ as well.)

    Source: the aim and the filling of gaps follow Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
    section 3 (arXiv 2401.10241); the patterns Qi et al. 2024, "Pipeline Parallelism with Controllable
    Memory" (arXiv 2405.15362).
    Ignores: contention of transfers, transient memory.

    Raises:
        ScheduleError: a microbatch does not fit into the memory limit.
    """
    stages = stages_of(placement, times, memory_limit)
    order = _best_within(placement, num_microbatches, stages, settings)
    if order is None:
        raise ScheduleError(
            f"{name}: no order of {num_microbatches} microbatches fits a memory limit of {memory_limit}; "
            f"one microbatch alone needs {one_microbatch(stages)}"
        )
    return program_of(name, placement, num_microbatches, order, stages.offsets)


def _best_within(
    placement: Placement, num_microbatches: int, stages: Stages, settings: SearchSettings
) -> Order | None:
    """Return the best complete order of a search under the limit and under smaller ones.

    A search does not find the optimum, and its result may be worse with more memory.
    """
    search = _OrderSearch(placement, num_microbatches, settings, one_microbatch(stages) / 2)
    for limit in chain([stages.limit], smaller_limits(stages, num_microbatches)):
        limited = stages._replace(limit=limit)
        enough_s = max(
            settings.good_enough_s, shortest_possible(limited, num_microbatches, settings.by_span) + TINY
        )
        if search.best_s <= enough_s:
            break
        search.under(limited, enough_s)
    return search.best


@dataclass
class _OrderSearch:
    """A search with the best complete order so far, None while none fits the memory; `step` is between smaller limits."""

    placement: Placement
    num_microbatches: int
    settings: SearchSettings
    step: float
    best_s: float = np.inf
    best: Order | None = None
    tried: set[tuple[int | bytes, ...]] = field(default_factory=set)
    _patterns: Patterns | None = None

    def under(self, stages: Stages, enough_s: float) -> None:
        """Search for a shorter order under the limit of `stages`, until one takes `enough_s` or less."""
        best_orders = self._starts(stages, enough_s)
        is_worth = best_orders.seconds[0] < NEARLY * self.best_s
        num_worth = int((best_orders.seconds < WORTH_A_TRY * best_orders.seconds[0]).sum()) if is_worth else 0
        for turn in range(NUM_BEST_ORDERS if num_worth else 0):
            if self.best_s <= enough_s:
                break
            self._improve(turn, turn % num_worth, best_orders, stages, enough_s)

    def _starts(self, stages: Stages, enough_s: float) -> BestOrders:
        """Return the shortest of the known schedules, list schedules and patterns."""
        shape = NUM_BEST_ORDERS, 2 * self.num_microbatches * len(stages.rank)
        best_orders = BestOrders(
            np.full(NUM_BEST_ORDERS, np.inf), np.zeros(NUM_BEST_ORDERS, np.int64),
            np.zeros((NUM_BEST_ORDERS, len(stages.limit))), np.empty(shape, np.int8), np.empty(shape, np.int16),
        )  # fmt: skip
        problem = (
            stages,
            self.num_microbatches,
            self.settings.by_span,
            FILL_RULES,
            NEARLY * WORTH_A_TRY * self.best_s,
        )
        choose_starts(*problem, enough_s, self.handmade, _windows(stages), best_orders)
        if best_orders.seconds[0] > enough_s:
            choose_patterns(*problem, self.patterns(stages), best_orders)
        return best_orders

    @cached_property
    def handmade(self) -> Order:
        return _handmade(self.placement, self.num_microbatches)

    def patterns(self, stages: Stages) -> Patterns:
        """Return the patterns, which are the same under every limit."""
        if self._patterns is None:
            rng = np.random.default_rng(self.settings.seed)
            self._patterns = patterns(stages, self.num_microbatches, self.settings.num_patterns, rng)
        return self._patterns

    def _improve(
        self, turn: int, place: int, best_orders: BestOrders, stages: Stages, enough_s: float
    ) -> None:
        """Improve a start within the memory that it needs, so that the result is the same under any limit."""
        peak, order = best_orders.peak[place], Order(best_orders.kinds[place], best_orders.stages[place])
        key = turn, int(best_orders.rule[place]), peak.tobytes(), *(row.tobytes() for row in order)
        if key in self.tried:
            return
        self.tried.add(key)
        needed = np.ceil((peak - TINY) / self.step) * self.step if self.step > 0 else stages.limit
        num_actions = 3 * len(stages.rank) * self.num_microbatches
        times = min(ACTIONS_PER_MOVE / num_actions, MOVES_PER_ACTION * num_actions)
        num_moves = int(self.settings.num_moves * times / NUM_BEST_ORDERS)
        is_annealed = START_SHARES[turn] > 0
        seconds, complete = improve(
            order, stages._replace(limit=np.minimum(stages.limit, needed)),
            self.num_microbatches, self.settings.by_span, FILL_RULES[best_orders.rule[place]],
            num_moves * (1 if is_annealed else PATIENCE), num_moves * (1 if is_annealed else MOST_TURNS),
            START_SHARES[turn], self.settings.seed + turn, enough_s,
        )  # fmt: skip
        if seconds < self.best_s - TINY:
            self.best_s, self.best = seconds, complete


def _handmade(placement: Placement, num_microbatches: int) -> Order:
    """Return the known zero-bubble schedules of this placement, [schedule, :], without weight gradients."""
    num_ranks = placement.num_ranks
    programs: list[Program] = []
    if placement == linear(num_ranks):
        programs = [zb_h1(num_ranks, num_microbatches), zb_h2(num_ranks, num_microbatches)]
    elif placement == v(num_ranks):
        programs = [zb_v(num_ranks, num_microbatches)]
    actions = [[a for a in program if a.kind is not Kind.W] for program in programs]
    shape = len(programs), 2 * num_microbatches * placement.num_stages
    return Order(
        np.array([[KINDS.index(a.kind) for a in program] for program in actions], np.int8).reshape(shape),
        np.array([[a.stage for a in program] for program in actions], np.int16).reshape(shape),
    )


def _windows(stages: Stages) -> Ints:
    """Return the maximum microbatches in flight per stage, for list schedules: multiples of the number of later stages."""
    num_ranks, num_stages = len(stages.limit), len(stages.rank)
    to_go = (num_stages - 1 - np.arange(num_stages)) * num_ranks / num_stages
    windows = [np.ceil(factor * to_go) + 1 for factor in WINDOWS]
    return np.array([*windows, np.full(num_stages, UNLIMITED)], np.int64)
