"""Breakdowns: every way of naming operators adds up to the whole."""

from __future__ import annotations

from typing import Literal

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.breakdown import WAYS, breakdown
from stagewright.estimation.eager_step import step_seconds
from stagewright.estimation.time import Costing
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import Job
from stagewright.planning.search import plan as search
from stagewright.tracing.cache import trace

CLUSTER = load_cluster("1x-h100")
JOB = Job(global_batch=2, sequence_length=32, dtype="fp32")


def test_every_breakdown_adds_up() -> None:
    graph = trace("tiny-llama", 2, **JOB.traced("cuda"))
    costing = Costing(graph, CLUSTER.device)
    device_s, host_s, *_ = costing.arrays
    for by in WAYS:
        shares = breakdown(costing, by)
        assert sum(share.seconds for share in shares) == pytest.approx(max(device_s.sum(), host_s.sum()))
        assert sum(share.flop for share in shares) == pytest.approx(costing.flop)
        assert sum(share.num_calls for share in shares) == len(graph.nodes)


def test_layers_are_in_the_order_of_the_model_and_alike() -> None:
    graph = trace("tiny-llama", 2, **JOB.traced("cuda"))
    layers = [
        share for share in breakdown(Costing(graph, CLUSTER.device), "layer") if ".layers." in share.name
    ]
    assert [int(share.name.rsplit(".", 1)[1]) for share in layers] == list(range(len(layers)))
    assert len({share.flop for share in layers}) == 1


def test_an_unknown_breakdown_is_refused() -> None:
    graph = trace("tiny-llama", 2, **JOB.traced("cuda"))
    with pytest.raises(InputError, match="did you mean 'layer'"):
        breakdown(Costing(graph, CLUSTER.device), "layers")


def test_a_plain_loop_is_predicted_by_its_allocations() -> None:
    """A training loop frees gradients between steps and makes copies in the optimizer step."""
    own = estimate("tiny-llama", CLUSTER, JOB, microbatch=2)
    looped = JOB.model_copy(update={"runtime": "torch-eager"})
    eager = estimate("tiny-llama", CLUSTER, looped, microbatch=2)
    rank = eager.predictions.ranks[0]
    assert rank.allocated_peak_bytes != own.predictions.ranks[0].allocated_peak_bytes
    assert rank.reserved_peak_bytes >= rank.allocated_peak_bytes == sum(rank.categories.values())
    with pytest.raises(InputError, match="whole batches on one device"):
        estimate("tiny-llama", CLUSTER, looped)
    with pytest.raises(InputError, match="there is nothing to search"):
        search("tiny-llama", CLUSTER, looped)
    assert estimate(eager, CLUSTER).predictions == eager.predictions
    with pytest.raises(InputError, match="give --recompute none or model"):
        estimate("tiny-llama", CLUSTER, looped, microbatch=2, recompute="full")
    with pytest.raises(InputError, match="whole batches on one device"):
        estimate(estimate("tiny-llama", CLUSTER, JOB).model_copy(update={"job": looped}), CLUSTER)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_plain_loop_takes_the_time_of_its_calls(dtype: Literal["bf16", "fp32"]) -> None:
    job = Job(global_batch=8, sequence_length=512, dtype=dtype, runtime="torch-eager")
    plan = estimate("gpt2", CLUSTER, job, microbatch=8)
    loop = job.profile.loop
    assert loop is not None
    wanted = step_seconds(graph_of(plan), loop, CLUSTER.device)
    assert plan.predictions.step_seconds == pytest.approx(wanted, rel=0.05)


def test_what_is_alive_at_the_peak_is_told_by_stage() -> None:
    plan = estimate("tiny-llama", load_cluster("2x-h100"), JOB.model_copy(update={"global_batch": 8}), pp=2)
    first, _ = plan.predictions.ranks
    assert first.peak_at.startswith("0")
    assert [(one.stage, one.num_microbatches > 0) for one in first.saved] == [(0, True)]
    assert sum(one.num_bytes for one in first.saved) <= first.allocated_peak_bytes
