"""What `plan` says in a sentence: whether it fits, and why devices are idle."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.bubble import bubble
from stagewright.report.plans import answer_line, plan_document

JOB = Job(global_batch=8, sequence_length=64, dtype="fp32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate("tiny-llama", load_cluster("2x1x-t4"), JOB, pp=2, schedule="1f1b")


def test_parts_of_the_bubble_are_the_whole(plan: Plan) -> None:
    costs = plan.predictions.costs
    assert costs is not None
    found = bubble(stage_program(plan), costs)
    assert found.total == pytest.approx(plan.predictions.bubble_fraction)
    assert found.warm_up > 0 and found.transfers > 0
    still = costs.model_copy(
        update={
            "transfers": tuple(
                one.model_copy(update={"value_seconds": 0.0, "gradient_seconds": 0.0})
                for one in costs.transfers
            )
        }
    )
    assert bubble(stage_program(plan), still).transfers == 0
    slower = still.model_copy(
        update={"forward_seconds": (costs.forward_seconds[0], 3 * costs.forward_seconds[1])}
    )
    assert bubble(stage_program(plan), slower).imbalance > found.imbalance


def test_what_is_left_is_the_fullest_ranks(plan: Plan) -> None:
    device = load_cluster("2x1x-t4").device
    peaks = [rank.reserved_peak_bytes for rank in plan.predictions.ranks]
    usable_bytes = device.usable_with_communicators(plan.predictions.ranks[0].communicator_bytes)
    assert plan_document(plan, None)["spare_bytes"] == usable_bytes - max(peaks)
    line = answer_line(plan)
    assert line.startswith("Fits with ") and f"on rank {peaks.index(max(peaks))}; MFU" in line
    assert "warm-up" in line and "above the lower bound for these degrees." in line
    tight = plan.model_copy(update={"job": JOB.model_copy(update={"memory_limit": max(peaks) - 2**20})})
    assert answer_line(tight).startswith("Lacks 1.0 MiB on rank ")


def test_a_lone_rank_has_no_parts() -> None:
    alone = estimate("tiny-llama", load_cluster("1x-t4"), JOB, pp=1)
    assert "bubble 0.0%;" in answer_line(alone)
    assert plan_document(alone, None)["bubble"] is None
