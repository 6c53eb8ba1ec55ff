"""Hanayo: waves down and up the ranks."""

from __future__ import annotations

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families.greedy import greedy
from stagewright.schedule.placement import wave
from stagewright.schedule.program import Program


def hanayo(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Program:
    """1F1B over stages that run down and up the ranks, `num_chunks` (two per wave) on each.

    The order is that of list scheduling with backwards twice as long as forwards: backwards first, deepest
    stage first, at most 2 P microbatches under way.

    Source: Liu et al. 2023, "Hanayo: Harnessing
    Wave-like Pipeline Parallelism", section 3 (arXiv 2308.15762); the paper gives no closed form, so this
    order is this project's reading of its rules.

    >>> print("\\n".join(hanayo(2, 2).lines()))
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    from stagewright.schedule.list_scheduler.stage_times import StageTimes  # numpy takes a while to import

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
