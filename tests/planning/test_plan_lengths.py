"""One plan for batches of several lengths: memory and time of each, and the order of plans over all."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.graph import OperatorGraph
from stagewright.planning.estimate import estimate
from stagewright.planning.job import load_job
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.ranking import ranked
from stagewright.planning.search import plan as search_plan
from stagewright.planning.search_result import SearchResult
from stagewright.planning.sequence_lengths import best_over_lengths, check_same_operators
from stagewright.report.plans import plan_document
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("2x-h100")


MODEL = resolve("tiny-llama", {"num_hidden_layers": 2})


def found(lengths: list[int], **asked: object) -> SearchResult:
    job = load_job(overrides={"global_batch": 8, "sequence_lengths": lengths, **asked})
    return search_plan(MODEL, CLUSTER, job, schedules=["1f1b", "gpipe"], microbatch=2)


def test_every_length_is_predicted_as_if_it_were_planned_for_alone() -> None:
    (best, *_) = found([32, 64, 32]).plans
    assert best.job.shares == {32: 2 / 3, 64: 1 / 3}
    assert list(best.by_length) == [32, 64] and best.by_length[64] == best.predictions
    assert estimate(best.at_length(32), CLUSTER).predictions == best.by_length[32]
    seconds = [one.step_seconds for one in best.by_length.values()]
    assert best.mean_step_seconds == pytest.approx((2 * seconds[0] + seconds[1]) / 3)
    tokens = 8 * (32 + 64 + 32) / (2 * seconds[0] + seconds[1])
    assert best.mean_rate(lambda one: one.tokens_per_second) == pytest.approx(tokens)
    assert estimate(best, CLUSTER).shorter_lengths == best.shorter_lengths
    shown = plan_document(best, None)
    assert [row["step_seconds"] for row in shown["lengths"]] == seconds
    assert shown["mean_step_seconds"] == best.mean_step_seconds <= shown["step_seconds"]
    assert shown["mean_tokens_per_second"] == pytest.approx(tokens)


def test_plans_are_ordered_by_their_time_over_all_lengths() -> None:
    (plan, *_) = found([32, 64]).plans

    def taking(*seconds: float) -> Plan:
        """The plan with other step times at 32 and 64 tokens."""
        (short,) = plan.shorter_lengths
        changed = [
            one.model_copy(update={"step_seconds": s})
            for one, s in zip(plan.by_length.values(), seconds, strict=True)
        ]
        shorter = (short.model_copy(update={"predictions": changed[0]}),)
        return plan.model_copy(update={"predictions": changed[1], "shorter_lengths": shorter})

    fast_if_long, fast_on_average = taking(3.0, 4.0), taking(1.0, 5.0)
    assert ranked([fast_if_long, fast_on_average]) == [fast_on_average, fast_if_long]
    alone = [one.at_length(64) for one in (fast_if_long, fast_on_average)]
    assert ranked(alone) == alone


def test_the_longest_is_what_must_fit() -> None:
    plain = found([64]).plans[0]
    limit = max(rank.reserved_peak_bytes for rank in plain.predictions.ranks) - 2**20
    for one in found([32, 64], memory_limit=limit).plans:
        for length in one.by_length.values():
            assert all(rank.reserved_peak_bytes <= limit for rank in length.ranks)
    refused = plain.model_copy(update={"job": plain.job.model_copy(update={"memory_limit": 2**20})})
    with pytest.raises(PlanError, match=r"no plan fits at all of the sequence lengths \[64\]"):
        best_over_lengths([refused], CLUSTER, lambda _: pytest.fail("nothing to trace"))


def test_every_rank_has_the_memory_of_its_own_device() -> None:
    (plan, *_) = found([64], memory_limit=None).plans
    plan = plan.model_copy(update={"pp": 2, "dp": 1, "devices": (1, 0)})
    (rank, *_) = plan.predictions.ranks
    needs = 2**30, 3 * 2**30
    ranks = tuple(
        rank.model_copy(update={"rank": number, "reserved_peak_bytes": size})
        for number, size in enumerate(needs)
    )
    plan = plan.model_copy(update={"predictions": plan.predictions.model_copy(update={"ranks": ranks})})
    assert best_over_lengths([plan], two_kinds(4 * 2**30, 2 * 2**30), no_trace)[0].devices == (1, 0)
    with pytest.raises(PlanError, match=r"over by 1\.00 GiB"):
        best_over_lengths([plan], two_kinds(2 * 2**30, 4 * 2**30), no_trace)


def two_kinds(*limits: int) -> Cluster:
    """A device each that may use so many bytes."""
    (node,) = load_cluster("1x-h100").nodes
    nodes = (node.model_copy(update={"device": with_room(node.device, limit)}) for limit in limits)
    return Cluster(name="two-kinds", nodes=tuple(nodes))


def no_trace(_: Plan) -> OperatorGraph:
    raise AssertionError("there is no shorter length")


def test_estimates_know_lengths_too() -> None:
    job = load_job(overrides={"global_batch": 2, "sequence_lengths": [32, 64]})
    whole = estimate(MODEL, CLUSTER, job, pp=1, dp=1, microbatch=2)
    assert list(whole.by_length) == [32, 64]
    looped = job.model_copy(update={"runtime": "torch-eager"})
    eager = estimate(MODEL, CLUSTER, looped, pp=1, dp=1, microbatch=2)
    for length, of_length in eager.by_length.items():
        alone = estimate(eager.at_length(length), CLUSTER)
        assert of_length.ranks == alone.predictions.ranks != whole.by_length[length].ranks


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
    with pytest.raises(InputError, match=r"\['32', 64\]: give whole numbers"):
        load_job(overrides={"global_batch": 8, "sequence_lengths": ["32", 64]})


def test_what_was_predicted_for_lengths_must_be_of_the_jobs_set(tmp_path: Path) -> None:
    (plan, *_) = found([32, 64]).plans
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == plan
    path.write_text(plan.model_dump_json(indent=1).replace('"sequence_length": 32', '"sequence_length": 48'))
    with pytest.raises(InputError, match=r"shorter_lengths are \[48\]"):
        load_plan(path)
