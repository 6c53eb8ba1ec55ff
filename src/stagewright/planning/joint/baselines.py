"""Baselines of the joint search: every schedule on even and on balanced stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from stagewright.errors import ScheduleError
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.joint.starts import balanced, even
from stagewright.schedule import build
from stagewright.schedule.placement import Placement, linear, loop, v, wave
from stagewright.schedule.program import Program

_MOST_ACTIONS_SEARCHED = 200
"""Maximum number of actions for schedules that search themselves."""
_MOST_ACTIONS = 50_000
"""Number of actions above which only common schedules are built: a program takes a microsecond per action."""


@dataclass(frozen=True)
class Baseline:
    """A schedule as a baseline: its placement by ranks and chunks, and the chunks it may have (None where there is no
    choice)."""

    name: str
    placement: Callable[[int, int], Placement]
    chunks: tuple[int | None, ...] = (None,)
    searches: bool = False
    is_common: bool = False


BASELINES = (
    Baseline("1f1b", lambda ranks, _: linear(ranks), is_common=True),
    Baseline("interleaved-1f1b", loop, (2, 3, 4, 6, 8), is_common=True),
    Baseline("zb-h1", lambda ranks, _: linear(ranks), is_common=True),
    Baseline("zb-h2", lambda ranks, _: linear(ranks)),
    Baseline("zb-v", lambda ranks, _: v(ranks), is_common=True),
    Baseline("interleaved-zb", loop, (2, 4)),
    Baseline("dualpipe-v", lambda ranks, _: v(ranks)),
    Baseline("gpipe", lambda ranks, _: linear(ranks)),
    Baseline("breadth-first", loop, (2, 4)),
    Baseline("hanayo", wave, (2, 4)),
    Baseline("v-half", lambda ranks, _: v(ranks), searches=True),
    Baseline("v-min", lambda ranks, _: v(ranks), searches=True),
    Baseline("zb-auto", lambda ranks, _: linear(ranks), searches=True),
)


def baselines(problem: JointProblem) -> Iterator[JointPlan]:
    """Yield every schedule on even and on balanced stages, whether or not it fits the memory; 1F1B on even stages comes
    first. Large problems have only the common schedules."""
    is_large = 3 * problem.layers.num_layers * problem.num_microbatches > _MOST_ACTIONS
    for baseline in BASELINES:
        if is_large and not baseline.is_common:
            continue
        for num_chunks in _chunks(baseline, problem):
            placement = baseline.placement(problem.num_ranks, num_chunks or 1)
            if placement.num_stages > problem.layers.num_layers:
                continue
            num_actions = 3 * placement.num_stages * problem.num_microbatches
            if baseline.searches and num_actions > _MOST_ACTIONS_SEARCHED:
                continue
            program = _built(baseline.name, problem.num_ranks, problem.num_microbatches, num_chunks)
            if program is None:
                continue
            layouts: dict[str, Layout | None] = {
                "even": even(problem, placement),
                "balanced": balanced(problem, placement),
            }
            loops = f" x{num_chunks}" if num_chunks else ""
            for kind, layout in layouts.items():
                if layout is not None:
                    yield judged(f"{baseline.name}{loops}, {kind}", problem, layout, program)


def _chunks(baseline: Baseline, problem: JointProblem) -> list[int | None]:
    """Return the numbers of stages per rank: those of the schedule, and for 1F1B also as many as there are layers for."""
    most = problem.layers.num_layers // problem.num_ranks
    chunks = [number for number in baseline.chunks if number is None or number <= most]
    if 3 * problem.layers.num_layers * problem.num_microbatches > _MOST_ACTIONS:
        chunks = chunks[:1]
    if baseline.name == "interleaved-1f1b" and most > 1 and most not in chunks:
        chunks.append(most)
    return chunks


@lru_cache(maxsize=64)
def _built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> Program | None:
    """Return the program, or None for sizes that the schedule does not support; cached, because the searches for one model
    share a few sizes."""
    try:
        return build(name, num_ranks, num_microbatches, num_chunks)
    except ScheduleError:
        return None
