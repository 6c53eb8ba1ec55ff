"""Where the state of the optimizer goes: to the host when that is the fastest way to fit, or the only one."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.bounds.coarse import Coarse
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.joint.top_configurations import joint_plans
from stagewright.planning.memory.fitting import Entry, Fit
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.planning.space import HostOptimizer, Space
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve
from stagewright.units import MIB

MODEL = resolve("tiny-llama", {"num_hidden_layers": 4})
SHORT = resolve("tiny-llama", {"num_hidden_layers": 1})
UNEVEN = resolve("tiny-llama", {"num_hidden_layers": 3, "hidden_size": 384, "intermediate_size": 1536})


def with_host(**figures: Any) -> Cluster:
    cluster = load_cluster("2x-h100")
    (node,) = cluster.nodes
    assert node.host is not None
    host = node.host.model_copy(update=figures)
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"host": host}),)})


def planned(cluster: Cluster, limit: int | None = None, num_samples: int = 16, **options: Any) -> Plan:
    job = Job(global_batch=num_samples, sequence_length=48, dtype="bf16", memory_limit=limit)
    return plan(MODEL, cluster, job, pp=2, microbatch=2, schedules=["gpipe"], **options).plans[0]


def fullest(item: Plan) -> int:
    return max(rank.reserved_peak_bytes for rank in item.predictions.ranks)


def test_what_fits_stays_on_the_device() -> None:
    found = planned(with_host())
    assert found.host_optimizer == () and all(not rank.host_bytes for rank in found.predictions.ranks)


def test_always_moves_every_rank_and_costs_its_time() -> None:
    plain, moved = planned(with_host()), planned(with_host(), host_optimizer="always")
    assert moved.host_optimizer == (0, 1) and moved.cuts == plain.cuts
    for before, after in zip(plain.predictions.ranks, moved.predictions.ranks, strict=True):
        state = before.categories["optimizer"] + before.categories["master"]
        assert after.allocated_peak_bytes == before.allocated_peak_bytes - state
        assert after.host_bytes >= state and not after.categories["optimizer"] + after.categories["master"]
    assert moved.predictions.step_seconds > plain.predictions.step_seconds
    slow = planned(with_host(memory_bandwidth=1e9), host_optimizer="always").predictions
    assert slow.step_seconds > 2 * moved.predictions.step_seconds


def test_auto_weighs_the_host_against_recomputation() -> None:
    options: dict[str, Any] = {"num_samples": 64, "offload": False}
    limit = fullest(planned(with_host(), **options)) - 30 * 2**20
    quick = planned(with_host(memory_bandwidth=1e13), limit, **options)
    slow = planned(with_host(memory_bandwidth=1e8), limit, **options)
    never = planned(with_host(), limit, host_optimizer="never", **options)
    assert quick.host_optimizer and set(never.memory_policy) != {"keep"}
    assert not slow.host_optimizer and set(slow.memory_policy) != {"keep"}
    assert slow.predictions == never.predictions
    assert quick.predictions.step_seconds < never.predictions.step_seconds


def test_a_job_too_large_for_its_devices_fits_with_their_host_if_that_has_room() -> None:
    state = sum(
        rank.categories["parameters"] + rank.categories["gradients"] for rank in planned(with_host()).predictions.ranks
    )  # fmt: skip
    limit = 40 * 2**20 + state  # less than half of what is needed with moments and master weights
    with pytest.raises(PlanError):
        planned(with_host(), limit, host_optimizer="never")
    assert fullest(planned(with_host(), limit)) <= limit
    with pytest.raises(PlanError):
        planned(with_host(memory_bytes=2**20), limit)


def test_a_cluster_without_hosts_says_so() -> None:
    cluster = load_cluster("2x-h100")
    bare = cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"host": None}),)})
    assert planned(bare).host_optimizer == ()
    with pytest.raises(InputError, match="host"):
        planned(bare, host_optimizer="always")


def test_a_host_without_room_is_named() -> None:
    with pytest.raises(PlanError, match=r"lacks .* of memory on a host.*\[nodes\.host\].*--host-optimizer"):
        planned(with_host(memory_bytes=2**20), host_optimizer="always")


def test_a_host_needs_room_only_for_the_ranks_that_use_it() -> None:
    found = uneven(with_host())
    assert found.host_optimizer == (1,), "the other rank has room"
    (host,) = (node.host for node in with_host().nodes)
    assert host is not None
    used = sum(rank.host_bytes for rank in found.predictions.ranks)
    enough = int(1.05 * used * host.num_devices / 2 / (1 - host.reserve_fraction))
    again = uneven(with_host(memory_bytes=enough))
    assert again.host_optimizer == found.host_optimizer and again.predictions == found.predictions


def uneven(cluster: Cluster, host_optimizer: HostOptimizer = "auto") -> Plan:
    """Of three layers, under a limit that only the rank with two of them is above."""
    job = Job(global_batch=64, sequence_length=48, dtype="bf16", memory_limit=105 * MIB)
    fixed: dict[str, Any] = {"pp": 2, "microbatch": 2, "schedules": ["1f1b"], "offload": False}
    return plan(UNEVEN, cluster, job, host_optimizer=host_optimizer, **fixed).plans[0]


@pytest.mark.parametrize("host_optimizer", ["auto", "always"])
def test_the_joint_search_leaves_what_has_room_on_the_devices(host_optimizer: HostOptimizer) -> None:
    cluster = with_host()
    known = uneven(cluster, host_optimizer)
    slow = known.predictions.model_copy(update={"step_seconds": 1.0})
    configuration = Configuration(
        known.dp, known.pp, 2, known.num_microbatches, recompute="auto", host_optimizer=host_optimizer == "always"
    )  # fmt: skip
    fit = Fit(known.model_copy(update={"predictions": slow}), Entry(configuration, cluster))
    coarse = Coarse(UNEVEN, cluster, known.job, lambda stage: None, trace)
    (joint,) = joint_plans([fit], [], coarse, Space(offload=False, host_optimizer=host_optimizer))
    found = joint.plan
    assert fullest(found) <= 105 * MIB
    assert len(known.host_optimizer) == (2 if host_optimizer == "always" else 1)
    if host_optimizer == "always":
        assert found.host_optimizer == (0, 1)
    else:  # alone what has no room on its device
        moved = [found.predictions.ranks[rank] for rank in found.host_optimizer]
        assert moved and all(rank.reserved_peak_bytes + rank.host_bytes > 105 * MIB for rank in moved)


def test_a_host_without_room_is_sent_no_saved_values() -> None:
    """The devices are slow, so that recomputing in a small model takes longer than moving."""
    options: dict[str, Any] = {"num_samples": 64, "host_optimizer": "never"}

    def slow(**figures: Any) -> Cluster:
        cluster = with_host(**figures)
        (node,) = cluster.nodes
        device = node.device.model_copy(update={"memory_bandwidth": 1e9, "host_link_bandwidth": 1e9})
        return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})

    plain = planned(slow(), **options)
    most = max(rank.categories["activations"] for rank in plain.predictions.ranks)
    limit = fullest(plain) - most * 3 // 10
    moved, small = (planned(slow(**size), limit, **options) for size in ({}, {"memory_bytes": 2**20}))
    assert offloaded(moved) and not offloaded(small)
    assert fullest(small) <= limit and set(small.memory_policy) != {"keep"}


def offloaded(item: Plan) -> int:
    return sum(stage.offloaded_bytes for stage in item.predictions.stages)
