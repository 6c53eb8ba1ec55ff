"""Planners of other systems: each does what it is known for, and is judged like our own plans."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peers.plans.blocks import block_ends, even_cuts
from peers.plans.search import plan_with
from peers.plans.strategies import STRATEGIES
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate
from stagewright.planning.configuration import Configuration
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job, load_job
from stagewright.planning.plan import StagePolicy, load_plan
from stagewright.planning.prediction.predict import rank_memories, run_timeline
from stagewright.planning.prediction.staged_model import costing
from stagewright.tracing.cache import trace
from stagewright.units import MIB

CLUSTER = load_cluster("4x-h100")


def job(limit: int | None = None) -> Job:
    return Job(global_batch=32, sequence_length=32, dtype="fp32", memory_limit=limit)


@cache
def body() -> RangeCosts:
    graph = trace("tiny-llama", 32, 64, "float32", {"num_hidden_layers": 8, "hidden_size": 64})
    return RangeCosts(graph, costing(graph, CLUSTER, job()))


def made(name: str, limit: int | None = None) -> Candidate:
    found = STRATEGIES[name].candidate(body(), Configuration(1, 4, 32, 16, "1f1b"), CLUSTER, job(limit))
    assert found is not None
    return found


def fullest(found: Candidate) -> int:
    return max(memory.peak_bytes for memory in found.memories)


def test_blocks_end_between_residual_additions() -> None:
    ends, cuts = block_ends(body(), 4), even_cuts(body(), 4)
    assert 16 <= len(ends) + 1 <= 22, "two blocks a layer, the embedding, and pieces of the head"
    places = [0, *(ends.tolist().index(cut) + 1 for cut in cuts), len(ends) + 1]
    shares = [b - a for a, b in pairwise(places)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_planner_makes_a_plan_where_memory_is_ample(name: str) -> None:
    found = made(name)
    assert found.excess_bytes <= 0 and len(found.cuts) == 3
    recomputed = {policy == "recompute" for policy in found.memory_policy}
    assert recomputed == {STRATEGIES[name].recompute} or found.memory_policy[-1] == "keep"
    assert [memory.peak_bytes for memory in rank_memories(found.staged)] == [
        m.peak_bytes for m in found.memories
    ]


def test_versions_of_weights_take_memory() -> None:
    flushed, stashed = made("even"), made("pipedream")
    versions = [memory.categories.get("weight versions", 0) for memory in stashed.memories]
    parameters = [memory.categories["parameters"] for memory in stashed.memories]
    assert versions == [3 * parameters[0], 2 * parameters[1], parameters[2], 0]
    assert all("weight versions" not in memory.categories for memory in flushed.memories)


def test_what_keeps_everything_does_not_fit_where_others_do() -> None:
    limit = int(0.7 * fullest(made("even"))) + CLUSTER.device.workspace_bytes
    assert made("even", limit).excess_bytes > 0
    found = made("adapipe", limit)
    assert found.excess_bytes <= 0 and set(found.memory_policy) != {"keep"}
    times = {name: run_timeline(made(name, limit).staged).makespan_s for name in ("own-1f1b", "adapipe")}
    assert times["own-1f1b"] <= times["adapipe"] * (1 + 1e-6)


def test_ends_of_stages_are_recomputed_in_whole_blocks() -> None:
    limit = int(0.7 * fullest(made("pipedream"))) + CLUSTER.device.workspace_bytes
    found = made("vpipe", limit)
    policies = [policy for policy in found.memory_policy if isinstance(policy, StagePolicy)]
    assert policies and all(policy.recompute and not policy.offload for policy in policies)
    assert found.excess_bytes <= 0


def test_a_search_with_a_strategy_is_a_search() -> None:
    found = plan_with("torchgpipe", "tiny-llama", CLUSTER, job(), pp=2, microbatch=4)
    assert all(plan.schedule == "gpipe" and plan.pp == 2 for plan in found.plans)
    steps = [plan.predictions.step_seconds for plan in found.plans]
    assert steps[0] <= 1.01 * min(steps)
    with pytest.raises(InputError, match="did you mean 'vpipe'"):
        plan_with("vpip", "tiny-llama", CLUSTER, job())
    with pytest.raises(PlanError, match="no configuration fits"):
        plan_with("even", "tiny-llama", CLUSTER, job(30 * MIB), pp=2, microbatch=4)


def test_plans_of_others_can_be_checked_saved_and_read(tmp_path: Path) -> None:
    found = plan_with("torchgpipe", "tiny-llama", CLUSTER, job(), pp=2, dp=2, microbatch=1).plans[0]
    found.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read.memory_policy == ("recompute", "recompute") and read.predictions == found.predictions
    assert estimate(read, CLUSTER).predictions == found.predictions


def test_plans_of_others_know_lengths_too() -> None:
    lengths = load_job(overrides={"global_batch": 4, "sequence_lengths": [32, 64]})
    for one in plan_with("even", "tiny-llama", CLUSTER, lengths, pp=4, dp=1, microbatch=2).plans:
        assert list(one.by_length) == [32, 64]


def test_a_precision_that_a_device_lacks_is_refused_before_the_model_is_traced() -> None:
    def trace(*_: object, **__: object) -> Any:
        pytest.fail("the model was traced")

    with pytest.raises(InputError, match="'t4' has no peak for bf16: train in one of fp32, fp16"):
        asked = Job(global_batch=4, sequence_length=32, dtype="bf16")
        plan_with("even", "tiny-llama", load_cluster("2x-t4"), asked, trace=trace)


def test_plans_of_others_leave_room_for_what_the_allocator_loses() -> None:
    """Blocks alone would fit, what the allocator reserves for them does not."""
    options: dict[str, Any] = {"pp": 4, "microbatch": 4}
    long = Job(global_batch=32, sequence_length=512, dtype="fp32")
    free = plan_with("even", "tiny-llama", CLUSTER, long, **options).plans[0].predictions
    least = max(rank.allocated_peak_bytes for rank in free.ranks) + 2 * MIB
    assert free.reserved_peak_bytes > least
    with pytest.raises(PlanError, match="no configuration fits"):
        plan_with("even", "tiny-llama", CLUSTER, long.model_copy(update={"memory_limit": least}), **options)
