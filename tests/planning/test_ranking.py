"""The order of plans: time, then memory among plans that are as good as equally fast."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.ranking import AS_FAST, ranked


@cache
def _some_plan() -> Plan:
    job = Job(global_batch=4, sequence_length=32, dtype="fp32")
    return estimate("tiny-llama", load_cluster("1x-h100"), job)


def _plan(seconds: float, num_bytes: int) -> Plan:
    plan = _some_plan()
    rank = plan.predictions.ranks[0].model_copy(update={"reserved_peak_bytes": num_bytes})
    predictions = plan.predictions.model_copy(update={"step_seconds": seconds, "ranks": (rank,)})
    return plan.model_copy(update={"predictions": predictions})


def _order(*plans: tuple[float, int]) -> list[tuple[float, int]]:
    return [
        (plan.predictions.step_seconds, plan.predictions.reserved_peak_bytes)
        for plan in ranked(_plan(*one) for one in plans)
    ]


def test_of_equally_fast_plans_the_smaller_is_first() -> None:
    assert _order((1.0, 400), (1.0, 100)) == [(1.0, 100), (1.0, 400)]
    assert _order((1.0, 400), (1.004, 100), (2.0, 1)) == [(1.004, 100), (1.0, 400), (2.0, 1)]


def test_a_plan_that_is_slower_by_more_waits_however_small() -> None:
    assert _order((1.0, 400), (1.006, 100)) == [(1.0, 400), (1.006, 100)]
    # A chain of plans, each within the tolerance of the next, does not pull the last one to the front.
    assert _order((1.0, 3), (1.004, 2), (1.008, 1)) == [(1.004, 2), (1.0, 3), (1.008, 1)]


@pytest.mark.parametrize("seconds", [0.01, 0.010025, 1.995, 2.0, 123.4])
def test_no_time_is_the_edge_of_a_bucket(seconds: float) -> None:
    assert _order((seconds, 2), (seconds * 1.001, 1)) == [(seconds * 1.001, 1), (seconds, 2)]
    assert _order((seconds, 2), (seconds * 0.999, 1)) == [(seconds * 0.999, 1), (seconds, 2)]


@given(st.lists(st.tuples(st.floats(1.0, 1.02), st.integers(1, 5)), max_size=8), st.randoms())
def test_the_order_depends_on_the_plans_alone(plans: list[tuple[float, int]], random: object) -> None:
    order = _order(*plans)
    shuffled = list(plans)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert _order(*shuffled) == order and sorted(order) == sorted(plans)
    steps = [seconds for seconds, _ in order]
    assert all(step <= (1 + AS_FAST) * min(steps[place:]) for place, step in enumerate(steps))
