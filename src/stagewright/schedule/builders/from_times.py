"""Zero-bubble schedules from a search with given stage times and memory: any limit, V-Half, V-Min."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagewright.schedule.placement import Placement, linear, v
from stagewright.schedule.program import Program

if TYPE_CHECKING:
    from stagewright.schedule.automatic import StageTimes


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    *,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
    by_span: bool = False,
    num_moves: int = 2000,
) -> Program:
    """Automatic zero-bubble schedule with one stage per rank.

    `times` default to one second for each action and one unit of memory per microbatch, half of it saved for the weight
    gradient; `memory_limit` to that of 1F1B on rank 0, P units. See `automatic.automatic`.
    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3 (arXiv 2401.10241).

    >>> print("\\n".join(zb_auto(2, 3).lines()))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    limit = float(num_ranks) if memory_limit is None else memory_limit
    settings = {"by_span": by_span, "num_moves": num_moves}
    return _searched("zb-auto", linear(num_ranks), num_microbatches, times, limit, **settings)


def v_half(
    num_ranks: int, num_microbatches: int, *, times: StageTimes | None = None, num_moves: int = 2000
) -> Program:
    """Schedule with half the activations of 1F1B: at most ``(P + 2) // 2`` microbatches of both stages of a rank.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (arXiv 2405.15362).

    >>> print("\\n".join(v_half(2, 2).lines()))
    0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    return _v_limited("v-half", num_ranks, num_microbatches, 2 * ((num_ranks + 2) // 2), times, num_moves)


def v_min(
    num_ranks: int, num_microbatches: int, *, times: StageTimes | None = None, num_moves: int = 2000
) -> Program:
    """Schedule with a third of the activations of 1F1B: at most ``(P + 4) // 3`` microbatches of both stages of a rank.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (arXiv 2405.15362).

    >>> v_min(4, 4).lines()[3]
    '3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3'
    """
    return _v_limited("v-min", num_ranks, num_microbatches, 2 * ((num_ranks + 4) // 3), times, num_moves)


def _v_limited(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_stage_activations: int,
    times: StageTimes | None,
    num_moves: int,
) -> Program:
    limit = num_stage_activations * (1.0 if times is None else float(times.saved.mean()))
    return _searched(name, v(num_ranks), num_microbatches, times, limit, num_moves=num_moves)


def _searched(
    name: str,
    placement: Placement,
    num_microbatches: int,
    times: StageTimes | None,
    memory_limit: float,
    **settings: Any,
) -> Program:
    """Return the result of `automatic.automatic`, by default for equal stage times."""
    from stagewright.schedule.automatic import (  # numba takes half a second
        SearchSettings,
        StageTimes,
        automatic,
    )

    times = times or StageTimes.uniform(placement.num_stages)
    return automatic(placement, num_microbatches, times, memory_limit, SearchSettings(**settings), name=name)
