"""The order of plans: time, then simplicity and memory among plans that are as good as equally fast."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.ranking import AS_FAST, chunks, complexity, ranked


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


def _first(*plans: Plan) -> Plan:
    return ranked(plans)[0]


def test_of_equally_fast_plans_the_simplest_is_first() -> None:
    simple, host = _plan(1.004, 400), _plan(1.0, 100).model_copy(update={"host_optimizer": (0,)})
    sliced = _plan(1.002, 200).model_copy(update={"loss_pieces": 8})
    recomputing = sliced.model_copy(update={"memory_policy": (StagePolicy(recompute=("a:1",)),)})
    assert _first(host, recomputing, sliced, simple) is simple
    assert ranked([host, recomputing, sliced]) == [sliced, recomputing, host]
    offloading = recomputing.model_copy(update={"memory_policy": (StagePolicy(offload=("a:1",)),)})
    assert complexity(offloading) == complexity(recomputing) == (False, 2)


def test_a_plan_on_the_host_is_first_only_if_it_is_faster() -> None:
    """However much else the plan without it does, unless that takes longer by more than estimates tell apart."""
    host = _plan(1.0, 100).model_copy(update={"host_optimizer": (0,)})
    busy = {"loss_pieces": 8, "memory_policy": (StagePolicy(recompute=("a:1",), offload=("b:1",)),)}
    assert _first(host, _plan(1.004, 400).model_copy(update=busy)) is not host
    assert _first(host, _plan(1.006, 400).model_copy(update=busy)) is host


def test_one_replica_more_is_simpler_than_a_pipeline() -> None:
    cluster, job = load_cluster("2x-h100"), Job(global_batch=8, sequence_length=32, dtype="fp32")
    pipeline = estimate("tiny-llama", cluster, job, pp=2, schedule="1f1b")
    looped = estimate("tiny-llama", cluster, job, pp=2, schedule="interleaved-1f1b")
    replicas = estimate("tiny-llama", cluster, job, pp=1, zero=3)
    assert [complexity(plan)[1] for plan in (replicas, pipeline, looped)] == [0, 1, 2]
    assert [chunks(plan) for plan in (replicas, pipeline, looped)] == [1, 1, 2]


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
