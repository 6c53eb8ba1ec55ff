"""Greedy list schedules: every rank always takes the most urgent work that is ready. Hanayo's waves follow the same rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.placement import Placement, loop, wave
from stagewright.schedule.program import Program

if TYPE_CHECKING:
    from stagewright.schedule.automatic import StageTimes


def greedy(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    placement: Placement | None = None,
    times: StageTimes | None = None,
    delays_unhidden: bool = True,
    max_in_flight: int | None = None,
) -> Program:
    """Greedy schedule with split backwards for given stage times on any placement (default: looped, equal times).

    Ready work is taken in the order input gradient, forward, weight gradient; after an input gradient the forward comes
    first. Input gradients of the deepest stage come first, other work is ordered by microbatch. With `delays_unhidden`, once
    backwards have begun, work whose input has just come from the rank that started last waits for other ready work, because
    no computation could hide its transfer. `max_in_flight` bounds the microbatches between their first forward and their
    last input gradient.

    Source: the list scheduler of AdaPtis (Guo et al. 2025, arXiv 2509.23722) as in
    github.com/guojihu-hana/SimPipe.
    Ignores: memory, beyond `max_in_flight`.

    >>> print("\\n".join(greedy(2, 3).lines()))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    import numpy as np  # here, because numba takes half a second to import

    from stagewright.schedule.list_scheduler.kernels import list_schedule
    from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of
    from stagewright.schedule.list_scheduler.stage_times import StageTimes, program_of, stages_of
    from stagewright.schedule.list_scheduler.terms import Rule

    placement = placement or loop(num_ranks, num_chunks)
    if placement.num_ranks != num_ranks:
        raise ScheduleError(f"greedy: a placement on {placement.num_ranks} ranks for {num_ranks} ranks")
    stages = stages_of(placement, times or StageTimes.uniform(placement.num_stages), np.inf)
    rule = Rule(1, False, False, np.inf, 0.0, UNLIMITED, delays_unhidden, 0.0)
    window = np.full(placement.num_stages, UNLIMITED)
    window[0] = max_in_flight or UNLIMITED
    deadlines = deadlines_of(stages, rule, np.zeros((4, placement.num_stages)))
    _, order = list_schedule(stages, num_microbatches, rule, window, deadlines, np.inf)
    return program_of("greedy", placement, num_microbatches, order, stages.offsets)


def hanayo(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Program:
    """1F1B over stages that run down and up the ranks, with `num_chunks` (two per wave) on each.

    The order is that of list scheduling with backwards twice as long as forwards: backwards first, deepest stage first, at
    most 2 P microbatches in flight.

    Source: Liu et al. 2023, "Hanayo: Harnessing
    Wave-like Pipeline Parallelism", section 3 (arXiv 2308.15762); the paper gives no closed form, so this
    order is this project's reading of its rules.

    >>> print("\\n".join(hanayo(2, 2).lines()))
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    from stagewright.schedule.list_scheduler.stage_times import (
        StageTimes,
    )  # here, as numba takes half a second

    if num_chunks < 2 or num_chunks % 2:
        raise ScheduleError(f"hanayo: a wave is two stages per rank, so num_chunks={num_chunks} must be even")
    placement = wave(num_ranks, num_chunks)
    times = StageTimes.uniform(placement.num_stages, input_grad_s=2.0, weight_grad_s=0.0)
    split = greedy(num_ranks, num_microbatches, placement=placement, times=times, max_in_flight=2 * num_ranks)
    whole = split.with_ranks(map(_with_full_backwards, split.ranks))
    return Program("hanayo", placement, num_microbatches, whole.ranks)


def _with_full_backwards(actions: tuple[Action, ...]) -> list[Action]:
    kept = (action for action in actions if action.kind is not Kind.W)
    return [Action(Kind.B, a.stage, a.microbatch) if a.kind is Kind.I else a for a in kept]
