"""Search for a short schedule with split backwards: many starting orders, the best improved by moves."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, product

import numpy as np

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.automatic.kernels import (
    TINY,
    Costs,
    FillRule,
    Floats,
    Out,
    build_greedily,
    improve,
    time_order,
)
from stagewright.schedule.automatic.limits import one_microbatch, shortest_possible, smaller_limits
from stagewright.schedule.automatic.patterns import (
    Order,
    gap_choices,
    interval,
    padded,
    pattern_order,
    uniform_times,
)
from stagewright.schedule.families.pieces import numbered
from stagewright.schedule.families.v_shaped import zb_v
from stagewright.schedule.families.zero_bubble import zb_h1, zb_h2
from stagewright.schedule.placement import Placement, linear, v
from stagewright.schedule.program import Program

_KINDS = (Kind.F, Kind.I, Kind.W)
_NEVER = 1 << 30
NUM_FINALISTS = 4
FILL_RULES = tuple(
    FillRule(backlog, share, levels)
    for backlog, share, levels in product((_NEVER, 0, 1, 2), (0.0, 0.5, 1.0), (False, True))
)


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds per stage, seconds to move a value or gradient over each edge ``s -> s + 1``, and memory per
    stage.

    `saved` is what a microbatch keeps from forward to input gradient, `held` what it keeps from there to
    its weight gradient, in any unit.
    """

    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    transfer_s: Floats
    saved: Floats
    held: Floats

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        transfer_s: float = 0.0,
        held: float = 0.5,
    ) -> StageTimes:
        """Equal stages that save one unit of memory per microbatch."""
        ones = np.ones(num_stages)
        edges = transfer_s * np.ones(num_stages - 1)
        return cls(forward_s * ones, input_grad_s * ones, weight_grad_s * ones, edges, ones, held * ones)


def automatic(
    placement: Placement,
    num_microbatches: int,
    times: StageTimes,
    memory_limit: float | Floats,
    *,
    by_span: bool = False,
    num_moves: int = 4000,
    num_patterns: int = 400,
    good_enough_s: float = 0.0,
    seed: int = 0,
    name: str = "zb-auto",
) -> Program:
    """A schedule with split backwards, as short as the search finds, that keeps within `memory_limit` on
    every rank.

    Minimises the makespan, or with `by_span` the longest span of a rank from its first to its last
    computation (the time of a batch when batches follow each other without a barrier). Starts from the
    known schedules, greedily built orders and `num_patterns` repeated patterns, times each with weight
    gradients filled in under 24 rules, and lets the best four make `num_moves` small moves each. The search
    ends early when it reaches `good_enough_s`. One seed, one result. Both numbers may be lowered where many
    schedules are compared.

    More memory never makes the result longer: what a search finds under a smaller limit, in steps of half
    of what a microbatch needs, is kept where it is shorter. (Limits between two steps may differ.)

    Source: the aim and the filling of gaps follow Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
    section 3 (arXiv 2401.10241); the patterns Qi et al. 2024, "Pipeline Parallelism with Controllable
    Memory" (arXiv 2405.15362).
    Ignores: contention of transfers, transient memory.

    Raises:
        ScheduleError: a microbatch does not fit into the memory limit.
    """
    costs = _costs(placement, times, memory_limit)
    aim = Aim(by_span, num_moves, num_patterns, good_enough_s, seed)
    found = _best_within(placement, num_microbatches, costs, aim)
    if found is None:
        raise ScheduleError(
            f"{name}: no order of {num_microbatches} microbatches fits a memory limit of {memory_limit}; "
            f"one microbatch alone needs {one_microbatch(costs)}"
        )
    return _program(name, placement, num_microbatches, found)


@dataclass(frozen=True)
class Aim:
    """What a search minimises and how long it goes on."""

    by_span: bool
    num_moves: int
    num_patterns: int
    good_enough_s: float
    seed: int


def _best_within(placement: Placement, num_microbatches: int, costs: Costs, aim: Aim) -> Out | None:
    """The best complete order of a search under the limit and under smaller ones.

    A search does not find the best, and may find less with more memory.
    """
    best_s, best = np.inf, None
    for limit in chain([costs.limit], smaller_limits(costs, num_microbatches)):
        limited = costs._replace(limit=limit)
        least_s = shortest_possible(limited, num_microbatches, aim.by_span)
        if best_s <= max(aim.good_enough_s, least_s + TINY):
            break
        enough = replace(aim, good_enough_s=max(aim.good_enough_s, least_s))
        found_s, found = _search(placement, num_microbatches, limited, enough)
        if found_s < best_s - TINY:
            best_s, best = found_s, found
    return best


def _search(placement: Placement, num_microbatches: int, costs: Costs, aim: Aim) -> tuple[float, Out | None]:
    """The seconds of the best complete order found and the order, ``None`` when none fits the memory."""
    starts = chain(
        _handmade(placement, num_microbatches),
        _built(costs, num_microbatches),
        _patterned(costs, num_microbatches, aim.num_patterns, np.random.default_rng(aim.seed)),
    )
    finalists = _best_starts(starts, costs, num_microbatches, aim)
    if not finalists:
        return np.inf, None
    best_s, _, order, rule = finalists[0]
    for place, (_, _, (passes, stages), start_rule) in enumerate(finalists):
        if best_s <= aim.good_enough_s:
            break
        moved = passes.copy(), stages.copy()
        reached = improve(
            *moved,
            num_microbatches,
            costs,
            start_rule,
            aim.by_span,
            aim.num_moves,
            aim.seed + place,
            aim.good_enough_s,
        )
        if reached < best_s:
            best_s, order, rule = reached, moved, start_rule
    return best_s, time_order(*order, num_microbatches, costs, rule)[2]


def _best_starts(
    starts: Iterable[Order], costs: Costs, num_microbatches: int, aim: Aim
) -> list[tuple[float, int, Order, FillRule]]:
    """The shortest of all starting orders with their best rules, shortest first."""
    found: list[tuple[float, int, Order, FillRule]] = []
    for index, order in enumerate(starts):
        timed = ((*time_order(*order, num_microbatches, costs, rule)[:2], rule) for rule in FILL_RULES)
        span, makespan, rule = min(timed, key=lambda entry: entry[0] if aim.by_span else entry[1])
        length = span if aim.by_span else makespan
        if length < np.inf:
            found = heapq.nsmallest(
                NUM_FINALISTS, [*found, (length, index, order, rule)], key=lambda entry: entry[:2]
            )
        if found and found[0][0] <= aim.good_enough_s:
            break
    return found


def _handmade(placement: Placement, num_microbatches: int) -> Iterator[Order]:
    """The known zero-bubble schedules of this placement."""
    num_ranks = placement.num_ranks
    if placement == linear(num_ranks):
        yield _order_of(zb_h1(num_ranks, num_microbatches))
        yield _order_of(zb_h2(num_ranks, num_microbatches))
    elif placement == v(num_ranks):
        yield _order_of(zb_v(num_ranks, num_microbatches))


def _order_of(program: Program) -> Order:
    passes = (
        [(_KINDS.index(a.kind), a.stage) for a in actions if a.kind is not Kind.W]
        for actions in program.ranks
    )
    return padded([np.array(row).T for row in passes])


def _built(costs: Costs, num_microbatches: int) -> Iterator[Order]:
    """Greedily built orders under various limits."""
    num_ranks, num_stages = len(costs.limit), len(costs.rank)
    to_go = (num_stages - 1 - np.arange(num_stages)) * num_ranks / num_stages
    for factor, after, deep in product((1.0, 1.5, 2.0, 3.0, np.inf), (False, True), (False, True)):
        window = np.ceil(factor * to_go) + 1 if factor < np.inf else np.full(num_stages, np.inf)
        out = build_greedily(num_ranks, num_microbatches, costs, window, after, deep)
        if out.length.sum() == 2 * num_stages * num_microbatches:
            yield out.passes[:, : out.length.max()].copy(), out.stages[:, : out.length.max()].copy()


def _patterned(
    costs: Costs, num_microbatches: int, num_patterns: int, rng: np.random.Generator
) -> Iterator[Order]:
    """Random patterns, half of them for equal passes without transfer times, half for the passes as they are."""
    for model in (uniform_times(costs), costs):
        for gaps in islice(gap_choices(model, rng), num_patterns // 2):
            yield pattern_order(model, num_microbatches, gaps, interval(model))


def _costs(placement: Placement, times: StageTimes, memory_limit: float | Floats) -> Costs:
    rank = np.array(placement.rank_of_stage, np.int64)
    crosses = rank[1:] != rank[:-1]
    edge_s = np.where(crosses, times.transfer_s, 0.0)
    return Costs(
        rank,
        *(
            np.asarray(column, np.float64)
            for column in (times.forward_s, times.input_grad_s, times.weight_grad_s)
        ),
        value_s=np.concatenate([[0.0], edge_s]),
        gradient_s=np.concatenate([edge_s, [0.0]]),
        saved=np.asarray(times.saved, np.float64),
        held=np.asarray(times.held, np.float64),
        limit=np.broadcast_to(np.asarray(memory_limit, np.float64), placement.num_ranks).copy(),
    )


def _program(name: str, placement: Placement, num_microbatches: int, out: Out) -> Program:
    ranks = []
    for rank in range(placement.num_ranks):
        length = int(out.length[rank])
        kinds = (_KINDS[index] for index in out.passes[rank, :length])
        steps = zip(kinds, map(int, out.stages[rank, :length]), strict=True)
        ranks.append(tuple(numbered(steps, num_microbatches)))
    return Program(name, placement, num_microbatches, tuple[tuple[Action, ...], ...](ranks))
