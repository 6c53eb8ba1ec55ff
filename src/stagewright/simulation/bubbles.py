"""Where the idle time of a timeline lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.schedule.action import Kind
from stagewright.simulation.timeline import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bubbles:
    """Idle seconds per rank by when they fall; the three add up to the timeline's `idle_s`.

    Warm-up is before the first backward starts anywhere, cool-down after the last forward ends anywhere,
    residual all others.
    Source: the accounting of AdaPtis (Guo et al. 2025, arXiv 2509.23722).
    """

    warmup_s: Floats
    residual_s: Floats
    cooldown_s: Floats


def split_bubbles(timeline: Timeline) -> Bubbles:
    """The idle time of every rank in three parts.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> bubbles = split_bubbles(simulate(build("1f1b", 2, 3), StageCosts.uniform(2)))
    >>> bubbles.warmup_s.tolist(), bubbles.residual_s.tolist(), bubbles.cooldown_s.tolist()
    ([0.0, 1.0], [2.0, 0.0], [1.0, 2.0])
    """
    kinds = [{part.kind for part in pattern.parts} for pattern in timeline.encoded.patterns]
    is_backward = np.array([bool(each & {Kind.B, Kind.I}) for each in kinds])[timeline.encoded.pattern]
    is_forward = np.array([Kind.F in each for each in kinds])[timeline.encoded.pattern]
    end = timeline.makespan_s
    first_backward = float(timeline.start_s[is_backward].min(initial=end))
    last_forward = max(first_backward, float(timeline.end_s[is_forward].max(initial=0.0)))
    parts = [(0.0, first_backward), (first_backward, last_forward), (last_forward, end)]
    idle = np.array(
        [[_idle_within(timeline, rank, *part) for rank in range(timeline.num_ranks)] for part in parts]
    )
    return Bubbles(*idle)


def _idle_within(timeline: Timeline, rank: int, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which `rank` computes nothing."""
    part = timeline.encoded.rank_slice(rank)
    computes = timeline.is_compute[part]
    start = np.clip(timeline.start_s[part][computes], begin, end)
    stop = np.clip(timeline.end_s[part][computes], begin, end)
    return float(end - begin - (stop - start).sum())
