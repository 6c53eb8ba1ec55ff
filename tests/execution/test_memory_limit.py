"""A job whose plain plan exceeds the limit trains under it: to the byte as predicted, with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import peaks_on_cpus, trained

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.prediction.staged_model import allocatable_bytes
from stagewright.planning.search import plan
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"num_hidden_layers": 4})


def slow_host_link() -> Cluster:
    """Two devices, slower than their hosts, that can hide only a part of what they might offload."""
    cluster = load_cluster("2x-h100")
    (node,) = cluster.nodes
    device = node.device.model_copy(update={"memory_bandwidth": 1e9, "host_link_bandwidth": 2e8})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def planned(cluster: Cluster, limit: int | None) -> Plan:
    job = Job(global_batch=16, sequence_length=48, dtype="fp32", num_steps=2, memory_limit=limit)
    return plan(MODEL, cluster, job, pp=2, microbatch=2, schedules=["gpipe"], host_optimizer="never").plans[0]


@pytest.mark.multiprocess
def test_a_job_trains_under_a_limit_that_its_plain_plan_exceeds(tmp_path: Path) -> None:
    cluster = slow_host_link()
    plain = planned(cluster, None)
    peak, activations = (
        max(count(rank) for rank in plain.predictions.ranks)
        for count in (lambda rank: rank.reserved_peak_bytes, lambda rank: rank.categories["activations"])
    )
    limit = peak - activations * 3 // 10
    found = planned(cluster, limit)
    assert len(found.cuts) == len(plain.cuts)
    ways = [policy for policy in found.memory_policy if isinstance(policy, StagePolicy)]
    assert any(way.offload for way in ways), "in less time than recomputing takes"
    wanted, got = trained(plain, tmp_path / "plain"), trained(found, tmp_path / "found")
    predicted = [rank.tensor_peak_bytes for rank in found.predictions.ranks]
    assert [rank.allocated_peak_bytes for rank in got.ranks] == peaks_on_cpus(found)
    allowed = allocatable_bytes(found.job.usable_bytes(cluster.device), cluster.device)
    assert max(predicted) <= allowed < max(rank.allocated_peak_bytes for rank in wanted.ranks)
    assert got.losses == wanted.losses and got.gradient_norms == wanted.gradient_norms
