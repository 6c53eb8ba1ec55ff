"""A joint search that is watched and stopped."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search

PROBLEM = JointProblem.of(
    LayerTable.of([1, 3, 1, 2, 1, 2, 4], [2, 5, 2, 3, 2, 3, 2], [1] * 7, saved_bytes=1.0), 3, 7
)


def test_progress_tells_the_best_and_the_bound() -> None:
    told: list[tuple[float, float]] = []
    found = search(PROBLEM, Effort(rounds=3, num_workers=1), report=lambda *both: told.append(both))
    assert len(told) == found.num_rounds == 3
    assert all(bound == found.bound.seconds <= best for best, bound in told)
    assert [best for best, _ in told] == sorted((best for best, _ in told), reverse=True)
    assert found.best.makespan_s <= told[-1][0]


@pytest.mark.parametrize("how", ["stop", "keyboard"])
def test_an_interrupted_search_returns_the_best_so_far(how: str) -> None:
    stop = threading.Event()

    def interrupt(best_s: float, bound_s: float) -> None:
        if how == "keyboard":
            raise KeyboardInterrupt
        stop.set()

    found = search(PROBLEM, Effort(rounds=1000, num_workers=1), report=interrupt, stop=stop)
    assert found.num_rounds == 1
    assert found.best.makespan_s <= min(plan.makespan_s for plan in found.baselines if plan.fits)


def test_ranks_keep_to_memory_of_their_own() -> None:
    layers = LayerTable.of(np.ones(6), np.ones(6), np.ones(6), parameter_bytes=2.0, saved_bytes=1.0)
    limits = [20.0, 6.0, 20.0]
    best = search(JointProblem.of(layers, 3, 6, memory_bytes=limits), Effort(rounds=2, num_workers=1)).best
    assert (best.timeline.peak_bytes <= limits).all()
