"""What a search works out, and what it says of all that it leaves out."""

from __future__ import annotations

import re

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.job import Job
from stagewright.planning.search import plan
from stagewright.planning.search_result import SearchResult
from stagewright.report.configurations import considered_line

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
    assert one.configuration in considered_line(usual)
    line = considered_line(every)
    assert f"{len(every.plans)} simulated in full" in line and "pruned" not in line


def test_every_reason_is_counted(every: SearchResult) -> None:
    kept = (plan for plan in every.plans if plan.schedule == "gpipe" and set(plan.memory_policy) == {"keep"})
    peaks = [plan.predictions.reserved_peak_bytes for plan in kept]
    tight = plan(
        "tiny-gemma",
        CLUSTER,
        JOB.model_copy(update={"memory_limit": (min(peaks) + max(peaks)) // 2}),
        schedules=("gpipe",),
        recompute="none",
        host_optimizer="never",
        loss_pieces=1,
    )
    line = considered_line(tight)
    total = sum(
        int(count.replace(",", "")) for count in re.findall(r"([\d,]+) (?:simulated|ruled|pruned)", line)
    )
    assert f"Considered {total:,} configurations" in line
    (reasons,) = re.findall(r"ruled out \((.*?)\)(?:,|\.$)", line)
    counts = [int(part.split()[0].replace(",", "")) for part in reasons.split("; ")]
    assert (
        sum(counts) == len(tight.excluded) and "out of memory" in reasons and "other reasons" not in reasons
    )


def test_as_many_plans_as_are_asked_for(every: SearchResult) -> None:
    assert len(found(3).plans) == 3
    assert len(found(1).plans) == 1
