"""What a search works out, and what it says of all that it leaves out."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.job import Job
from stagewright.planning.search import plan
from stagewright.planning.search_result import SearchResult
from stagewright.report.plans import left_out

CLUSTER = load_cluster("4x-h100")
JOB = Job(global_batch=32, sequence_length=512, dtype="fp32")


def found(keep: int | None) -> SearchResult:
    return plan(
        "tiny-gemma",
        CLUSTER,
        JOB,
        keep=keep,
        schedules=("1f1b", "gpipe", "breadth-first"),
        tp=1,
        largest_microbatch=4,
    )


@pytest.fixture(scope="module")
def usual() -> SearchResult:
    return found(None)


@pytest.fixture(scope="module")
def every() -> SearchResult:
    return found(1000)


def test_what_is_left_out_is_slower(usual: SearchResult, every: SearchResult) -> None:
    """Everything worked out, nothing is faster than what a search that stops at the best finds."""
    assert usual.num_bounded > every.num_bounded == 0
    fastest = min(one.predictions.step_seconds for one in every.plans)
    assert usual.plans[0].predictions.step_seconds <= fastest * 1.005
    assert len(every.plans) > len(usual.plans)


def test_the_next_best_is_named(usual: SearchResult, every: SearchResult) -> None:
    one = usual.next_best
    assert one is not None and every.next_best is None
    assert one.seconds >= min(plan.predictions.step_seconds for plan in usual.plans)
    assert one.configuration in left_out(usual)
    assert "slower" not in left_out(every)


def test_as_many_plans_as_are_asked_for(every: SearchResult) -> None:
    assert len(found(3).plans) == 3
    assert len(found(1).plans) == 1
