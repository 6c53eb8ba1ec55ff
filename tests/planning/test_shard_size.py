"""Hybrid sharding in a plan: gathers stay within a node, for more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from stagewright.cluster import all_reduce_seconds, load_cluster, reduce_scatter_seconds
from stagewright.errors import InputError
from stagewright.graph.flat_buffers import FlatLayout
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.sharding import Collectives
from stagewright.planning.search import plan
from stagewright.tracing.models.reference import resolve


@pytest.fixture(scope="module")
def plans() -> dict[int | None, Plan]:
    """By the replicas that share out, of 16 on two nodes."""
    reference = resolve("tiny-llama", {"hidden_size": 512, "intermediate_size": 2048})
    job = Job(global_batch=16, sequence_length=64)
    return {
        size: plan(
            reference, load_cluster("16x-h100"), job, pp=1, schedules=["1f1b"], tp=1, zero=3, shard_size=size
        ).plans[0]
        for size in (None, 8, 3, 1)
    }


def test_gathers_within_a_node_are_faster() -> None:
    cluster = load_cluster("16x-v100-32")
    flat = FlatLayout((0,), "bfloat16", True, 3, 8, (), 1 << 20, num_copies=2)
    of_all = replace(flat, num_shards=16, num_copies=1)
    found = Collectives(cluster, range(16))
    assert found.gather([flat]) < 0.8 * found.gather([of_all])
    item = ITEM_BYTES["float32"]
    summed = reduce_scatter_seconds(cluster, flat.num_elements * item, range(8))
    over_copies = all_reduce_seconds(cluster, flat.num_elements // 8 * item, (0, 8))
    assert found.reduce([flat]) == summed + over_copies


def test_groups_of_a_node_keep_more(plans: dict[int | None, Plan]) -> None:
    whole, node = plans[None], plans[8]
    assert (whole.shard_size, node.shard_size) == (None, 8)
    kept, shared = (one.predictions.ranks[0].categories["optimizer"] for one in (node, whole))
    assert kept == pytest.approx(2 * shared, rel=0.01)


def test_groups_are_the_largest_that_divide_the_replicas(plans: dict[int | None, Plan]) -> None:
    assert plans[3].shard_size == 2
    peaks = [
        plans[size].predictions.ranks[0].allocated_peak_bytes for size in (1, 3, 8)
    ]  # all in as many pieces
    assert peaks == sorted(peaks, reverse=True)


def test_a_size_that_does_not_divide_is_refused(plans: dict[int | None, Plan]) -> None:
    document = plans[8].model_dump()
    with pytest.raises(ValidationError, match="shard_size 3 does not divide the 16 ranks"):
        Plan.model_validate(document | {"shard_size": 3})


@pytest.mark.parametrize("zero", [None, 0])
def test_a_size_without_anything_to_share_out_is_refused(zero: int | None) -> None:
    cluster, job = load_cluster("4x-h100"), Job(global_batch=16, sequence_length=64)
    for search in (plan, estimate):
        with pytest.raises(InputError, match="--zero 1, 2 or 3"):
            search("tiny-llama", cluster, job, dp=4, zero=zero, shard_size=2)
