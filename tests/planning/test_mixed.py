"""Mixed clusters get stages as long as their devices are fast."""

from __future__ import annotations

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError
from stagewright.planning import search
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, load_plan

JOB = Job(global_batch=16, sequence_length=512, dtype="bf16")


@pytest.fixture(scope="module")
def mixed() -> Cluster:
    """A third A100, the rest at half its rates."""
    fast = load_cluster("1x-a100-40").nodes[0]
    device = fast.device
    figures = {
        "name": "half-a100",
        "peak_flops": device.peak_flops.model_copy(
            update={name: (device.peak_flops.get(name) or 0) / 2 for name in device.peak_flops.available()}
        ),
        "memory_bandwidth": device.memory_bandwidth / 2,
        "launch_overhead_s": device.launch_overhead_s * 2,
        "host_overhead_s": device.host_overhead_s * 2,
    }
    slow = fast.model_copy(update={"device": device.model_copy(update=figures), "count": 2})
    return Cluster(name="mixed", nodes=(slow, fast))


def best(cluster: Cluster, pp: int = 3) -> Plan:
    return search.plan("gpt2", cluster, JOB, pp=pp, microbatch=2, schedules=("1f1b",)).plans[0]


def test_the_fast_device_has_twice_the_work(mixed: Cluster, tmp_path) -> None:
    plan = best(mixed)
    position = plan.devices.index(2)
    assert position in (0, 2)
    work = [
        stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        for stage in plan.predictions.stages
    ]
    assert max(work) < 1.1 * min(work)  # all are busy, though one is fast
    sizes = [stage.stop - stage.start for stage in plan.predictions.stages]
    others = [size for rank, size in enumerate(sizes) if rank != position]
    assert sizes[position] > 1.4 * max(others)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").cluster.device == "half-a100 + " + mixed.nodes[1].device.name


def test_unequal_stages_beat_equal_ones(mixed: Cluster) -> None:
    slow = mixed.nodes[0].model_copy(update={"count": 3})
    all_slow = best(Cluster(name="slow", nodes=(slow,)))
    step = best(mixed).predictions.step_seconds
    # Rates of 2 + 1 + 1 in place of 1 + 1 + 1; equal stages would gain nothing.
    assert 0.7 < step / all_slow.predictions.step_seconds < 0.85


def test_what_mixed_plans_do_not_have_is_said(mixed: Cluster) -> None:
    with pytest.raises(InputError, match="mixes devices"):
        search.plan("gpt2", mixed, JOB, zero=3)
