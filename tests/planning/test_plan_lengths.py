"""One plan for batches of several lengths: memory and time of each, and the order of plans over all."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import load_job
from stagewright.planning.lengths import best_over_lengths, check_same_operators
from stagewright.planning.search import Found, plan
from stagewright.report.plans import plan_document
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("2x-h100")


MODEL = resolve("tiny-llama", {"num_hidden_layers": 2})


def found(lengths: list[int], **asked: object) -> Found:
    job = load_job(overrides={"global_batch": 8, "sequence_lengths": lengths, **asked})
    return plan(MODEL, CLUSTER, job, schedules=["1f1b", "gpipe"], microbatch=2)


def test_every_length_is_predicted_as_if_it_were_planned_for_alone() -> None:
    (best, *_) = found([32, 64, 32]).plans
    assert [(one.sequence_length, one.share) for one in best.lengths] == [(32, 2 / 3), (64, 1 / 3)]
    assert best.lengths[1].predictions == best.predictions
    short = best.model_copy(update={"job": best.job.at_length(32), "lengths": ()})
    assert estimate(short, CLUSTER).predictions == best.lengths[0].predictions
    seconds = [one.predictions.step_seconds for one in best.lengths]
    assert best.mean_step_seconds == pytest.approx((2 * seconds[0] + seconds[1]) / 3)
    assert estimate(best, CLUSTER).lengths == best.lengths
    shown = plan_document(best, None)["lengths"]
    assert [row["step_seconds"] for row in shown] == seconds


def test_plans_are_ordered_by_their_time_over_all_lengths() -> None:
    plans = found([32, 64]).plans
    assert len(plans) > 1
    means = [one.mean_step_seconds for one in plans]
    assert all(later >= 0.995 * earlier for earlier, later in pairwise(means))


def test_the_longest_is_what_must_fit() -> None:
    plain = found([64]).plans[0]
    limit = max(rank.reserved_peak_bytes for rank in plain.predictions.ranks) - 2**20
    for one in found([32, 64], memory_limit=limit).plans:
        for length in one.lengths:
            assert all(rank.reserved_peak_bytes <= limit for rank in length.predictions.ranks)
    refused = plain.model_copy(update={"job": plain.job.model_copy(update={"memory_limit": 2**20})})
    with pytest.raises(PlanError, match=r"no plan fits at all of the lengths \[64\]"):
        best_over_lengths([refused], CLUSTER, lambda _: pytest.fail("nothing to trace"))


def test_a_model_that_does_other_things_with_other_lengths_is_refused() -> None:
    longest, deeper = (
        trace(resolve("tiny-llama", {"num_hidden_layers": n}), 2, 32, "float32") for n in (2, 3)
    )
    check_same_operators(longest, longest, 32)
    with pytest.raises(PlanError, match="other operators or constants for samples of 32 tokens"):
        check_same_operators(longest, deeper, 32)


def test_the_length_of_a_job_is_the_longest_of_its_set() -> None:
    job = load_job(overrides={"global_batch": 8, "sequence_lengths": [32, 64]})
    assert job.sequence_length == 64 and job.length_of(2) == 32
    with pytest.raises(InputError, match="not the longest"):
        load_job(overrides={"global_batch": 8, "sequence_lengths": [32, 64], "sequence_length": 32})
