"""A plan states what its times follow from: the document alone gives exactly what was predicted with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.checks import check_predicted_memory, check_predicted_time
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.step_times import simulated, whole_step_seconds
from stagewright.planning.search import plan as search
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"num_hidden_layers": 3})
H100 = load_cluster("8x-h100")
ATTIC = load_cluster("2x-rtx3090", {"device.kind": "cpu", "device.message_overhead_s": "1e-5"})

CASES: dict[str, dict[str, Any]] = {
    "zero bubbles": {"pp": 2, "schedule": "zb-h1"},
    "three ranks, tied": {"pp": 3, "schedule": "1f1b"},
    "chunks": {"pp": 1, "schedule": "breadth-first", "dp": 2},
    "recomputed": {"pp": 2, "recompute": "full"},
    "replicas": {"pp": 2, "dp": 2, "zero": 0},
    "sharded": {"pp": 2, "dp": 2, "zero": 3, "shard_size": 2, "reduce_dtype": "bf16"},
    "updated early": {"pp": 2, "dp": 2, "schedule": "pipedream"},
    "tensor parallel": {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True},
}


def job(**more: Any) -> Job:
    return Job.model_validate(
        {"global_batch": 8, "sequence_length": 32, "dtype": "bf16", "clip_norm": None, **more}
    )


def check_kept(plan: Plan, cluster: Cluster, path: Path) -> None:
    """What the document of `plan` says is what the model says, to the last digit, at every length."""
    plan.save(path)
    read = load_plan(path)
    assert read == plan
    for length, predictions in read.by_length.items():
        one = read.at_length(length)
        costs = predictions.costs
        assert costs is not None and one.predictions is predictions
        timeline = simulated(stage_program(one), costs)
        assert whole_step_seconds(timeline, costs) == predictions.step_seconds
        assert timeline.bubble_fraction == predictions.bubble_fraction
        assert timeline.busy_s.tolist() == [rank.busy_seconds for rank in predictions.ranks]
        known = run_timeline(staged_model_of(one, cluster))
        assert timeline.start_s.tolist() == known.start_s.tolist()
        assert timeline.end_s.tolist() == known.end_s.tolist()
        assert "per step" in check_predicted_time(one, costs)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_simulated_without_its_model(case: str, tmp_path: Path) -> None:
    asked = CASES[case]
    model = resolve("tiny-gpt2") if "tied" in case else MODEL
    check_kept(estimate(model, H100, job(), **asked), H100, tmp_path / "plan.json")


def test_processes_that_post_their_own_messages_pay_in_the_plan_too(tmp_path: Path) -> None:
    plan = estimate(MODEL, ATTIC, job(dtype="fp32"), pp=2)
    costs = plan.predictions.costs
    assert costs is not None and costs.forward_seconds[0] > plan.predictions.stages[0].forward_seconds
    check_kept(plan, ATTIC, tmp_path / "plan.json")


def test_every_plan_of_a_search_is_kept_at_every_length(tmp_path: Path) -> None:
    lengths = job(sequence_lengths=(16, 32))
    cluster, schedules = load_cluster("4x-h100"), ("1f1b", "joint")
    found = search(MODEL, cluster, lengths, pp=2, dp=2, microbatch=1, schedules=schedules, offload=True)
    assert found.plans and all(len(plan.by_length) == 2 for plan in found.plans)
    for plan in found.plans[:3]:
        check_kept(plan, cluster, tmp_path / "plan.json")


def test_costs_are_a_small_part_of_a_plan() -> None:
    plan = estimate(
        resolve("tiny-llama", {"num_hidden_layers": 64}),
        load_cluster("64x-h100"),
        job(global_batch=256),
        pp=64,
    )
    assert plan.predictions.costs is not None and plan.num_stages == 64
    costs = len(plan.predictions.costs.model_dump_json(indent=1))
    assert costs < 0.1 * len(plan.model_dump_json(indent=1))


def test_what_does_not_follow_from_the_costs_is_refused() -> None:
    plan = estimate(MODEL, H100, job(), pp=2)
    faster = plan.predictions.model_copy(update={"step_seconds": plan.predictions.step_seconds / 2})
    boast = plan.model_copy(update={"predictions": faster})
    assert faster.costs is not None
    with pytest.raises(PlanError, match=r"the plan says .* per step, but its program takes .*: plan again"):
        check_predicted_time(boast, faster.costs)


def test_promised_memory_is_held_against_the_devices() -> None:
    plan = estimate(MODEL, H100, job(), pp=2, dp=2)
    assert plan.usable_bytes(H100) == [H100.device.usable_bytes] * 2
    assert "as the plan says" in check_predicted_memory(plan, H100)
    needed = plan.predictions.reserved_peak_bytes
    tight = plan.model_copy(update={"job": plan.job.model_copy(update={"memory_limit": needed - 1})})
    with pytest.raises(PlanError, match="1 B more than it may use"):
        check_predicted_memory(tight, H100)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("forward_seconds", [1.0], "forward_seconds has 1 entries where 2 belong"),
        ("backward_seconds", [], "backward_seconds has 0 entries where 2 belong"),
        ("weight_grad_seconds", [1.0, -1.0], "weight_grad_seconds"),
        ("gather_seconds", [1.0] * 3, "gather_seconds has 3 entries"),
        ("optimizer_seconds", [1.0], "optimizer_seconds has 1 entries where 2 belong"),
        ("sum_seconds", [], "one of sum_seconds and optimizer_seconds"),
        ("norm_seconds", 1e40, "norm_seconds"),
        ("transfers", "reversed", "go from a stage to a later one"),
        ("transfers", "twice", "each pair once"),
        ("transfers", "far", "go from a stage to a later one"),
    ],
)
def test_costs_that_make_no_sense_are_refused_by_key(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    document = json.loads(estimate(MODEL, H100, job(), pp=2).model_dump_json())
    costs = document["predictions"]["costs"]
    (sent,) = costs["transfers"]
    named = {
        "reversed": [sent | {"source": 1, "target": 0}], "twice": [sent, sent], "far": [sent | {"target": 2}],
    }  # fmt: skip
    costs[key] = named[value] if isinstance(value, str) else value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message):
        load_plan(path)


def test_a_plan_without_costs_is_read() -> None:
    plan = estimate(MODEL, H100, job(), pp=2)
    document = json.loads(plan.model_dump_json())
    del document["predictions"]["costs"]
    assert Plan.model_validate(document).predictions.costs is None
