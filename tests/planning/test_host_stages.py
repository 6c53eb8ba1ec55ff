"""Hosts as ranks: they take the stages that devices have no room for, at the speed that they have."""

from __future__ import annotations

from typing import Any

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster, with_hosts
from stagewright.errors import InputError, PlanError
from stagewright.planning import search
from stagewright.planning.job import Job
from stagewright.planning.objectives.host_stages import plan_with_hosts
from stagewright.tracing.models.reference import resolve
from stagewright.units import MIB

MODEL = resolve("tiny-llama", {"num_hidden_layers": 2})


def small(num_bytes: int) -> Cluster:
    """Two devices that may use so many bytes each, with a host that is slow even for a model without work."""
    (node,) = load_cluster("2x-h100").nodes
    assert node.host is not None
    host = node.host.model_copy(update={"memory_bandwidth": 5e9, "num_devices": 2})
    device = with_room(node.device, num_bytes)
    return Cluster(name="small", nodes=(node.model_copy(update={"device": device, "host": host}),))


def job() -> Job:
    return Job(global_batch=4, sequence_length=64, dtype="bf16")


def test_a_host_is_a_device_of_its_node() -> None:
    whole = with_hosts(load_cluster("16x-h100"))
    assert (
        whole.num_devices == 18
        and [whole.device_of(rank).kind for rank in (0, 15, 16, 17)] == ["cuda"] * 2 + ["cpu"] * 2
    )
    host = whole.device_of(16)
    assert host.memory_bytes == 2e12 and all(map(host.source_of, host.figures()))
    part = with_hosts(load_cluster("2x-h100")).device_of(2)
    assert 4 * part.memory_bytes == host.memory_bytes and 4 * part.memory_bandwidth == host.memory_bandwidth
    assert 4 * (part.peak_flops.get("bf16") or 0) == host.peak_flops.get("bf16")
    assert whole.link_between(16, 0).bandwidth <= load_cluster("1x-h100").device.host_link_bandwidth


def test_a_host_takes_a_stage_only_where_that_pays() -> None:
    plenty = plan_with_hosts(MODEL, small(2**30), job(), schedules=["1f1b"], microbatch=1)
    assert plenty.plans[0].pp <= 2, "devices with room are faster alone"
    options: dict[str, Any] = {"schedules": ["1f1b"], "microbatch": 1, "host_optimizer": "never"}
    tight = small(44 * MIB)
    with pytest.raises(PlanError):
        search.plan(MODEL, tight, job(), **options)
    found = plan_with_hosts(MODEL, tight, job(), **options).plans[0]
    assert found.pp == 3
    cluster = found.cluster.load()
    devices = found.devices or (0, 1, 2)
    for rank, device in zip(found.predictions.ranks, devices, strict=True):
        assert rank.reserved_peak_bytes <= cluster.device_of(device).usable_bytes
    on_host = devices.index(2)
    stages = found.predictions.stages
    assert stages[on_host].parameter_bytes > min(stage.parameter_bytes for stage in stages)


@pytest.mark.parametrize("asked", [{"dp": 2}, {"pp": 2}, {"tp": 2}])
def test_hosts_take_part_only_in_what_is_asked_for(asked: dict[str, Any]) -> None:
    options: dict[str, Any] = {"schedules": ["1f1b"], "microbatch": 1, "host_optimizer": "never"}
    free = plan_with_hosts(MODEL, small(2**30), job(), **options)
    assert any(plan.pp == 3 for plan in free.plans)
    found = plan_with_hosts(MODEL, small(2**30), job(), **options | asked)
    assert found.plans and all(plan.pp < 3 for plan in found.plans)
    assert any("with hosts" in one.reason for one in found.excluded)


def test_hosts_must_be_described() -> None:
    (node,) = load_cluster("2x-h100").nodes
    bare = Cluster(name="bare", nodes=(node.model_copy(update={"host": None}),))
    with pytest.raises(InputError, match="host"):
        plan_with_hosts(MODEL, bare, job())
