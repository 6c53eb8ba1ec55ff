"""Ranks on the devices that a plan names: the same training wherever they are, and faster around a slow link."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan

import namespaces
from multiprocess import run_ranks
from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError
from stagewright.planning import search
from stagewright.planning.assignment.rank_file import read_rank_file
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, load_plan
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess

HOSTS = """
[[nodes]]
count = {count}
devices_per_node = 1
num_nics = 1

[nodes.device]
name = "small"
kind = "cpu"
memory_bytes = "8 GiB"
memory_bandwidth = "6 GB/s"
peak_flops = {{ fp32 = 2e10 }}
matmul_efficiency = {{ fp32 = 0.9 }}
matmul_half_flop = 1e5
attention_efficiency = 0.4
attention_backward_efficiency = 0.4
memory_efficiency = 0.9
launch_overhead_s = 0.0
context_bytes = "200 MiB"
workspace_bytes = 0
reserve_fraction = 0.04
host_link_bandwidth = "3 GB/s"
host_overhead_s = 8e-6

[nodes.intra_node]
latency_s = 1e-4
bandwidth = "25 MB/s"

[nodes.inter_node]
latency_s = 1e-4
bandwidth = "25 MB/s"

[measured]
between = "ranks"
bandwidth = "links.csv"
bandwidth_unit = "MB/s"
"""


def hosts_file(folder: Path, count: int, slow: tuple[int, int]) -> Path:
    """Hosts joined at 25 MB/s, but for one pair at 1 MB/s both ways."""
    rates = [["1" if {a, b} == set(slow) else "25" for b in range(count)] for a in range(count)]
    (folder / "links.csv").write_text("\n".join(",".join(row) for row in rates) + "\n")
    (folder / "hosts.toml").write_text(HOSTS.format(count=count))
    return folder / "hosts.toml"


def planned(cluster: Cluster) -> Plan:
    job = Job(global_batch=8, sequence_length=128, num_steps=2, dtype="fp32")
    found = search.plan(
        resolve("tiny-llama", {"num_hidden_layers": 3}),
        cluster,
        job,
        pp=3,
        microbatch=4,
        schedules=("gpipe",),
        recompute="none",
    )
    return found.plans[0]


def test_the_plan_keeps_neighbouring_stages_off_a_slow_link(tmp_path: Path) -> None:
    cluster = load_cluster(hosts_file(tmp_path, 3, (0, 1)))
    plan = planned(cluster)
    assert abs(plan.devices.index(0) - plan.devices.index(1)) == 2, plan.devices
    assert [plan.rank_on(device) for device in plan.devices] == [0, 1, 2]
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").devices == plan.devices
    elsewhere = planned(load_cluster(hosts_file(tmp_path, 3, (0, 2))))
    assert elsewhere.devices == ()  # the devices' own order is as good as any
    assert elsewhere.predictions.step_seconds == pytest.approx(plan.predictions.step_seconds, rel=1e-6)


def test_a_rank_file_names_devices(tmp_path: Path) -> None:
    cluster = load_cluster(hosts_file(tmp_path, 3, (0, 1)))
    path = tmp_path / "ranks.csv"
    path.write_text("rank,node,device\n0,2,0\n1,0,0\n2,1,0\n")
    assert read_rank_file(path, cluster, 3) == (2, 0, 1)
    for text, match in (
        ("rank,node,device\n0,2,0\n1,0,0\n2,0,0\n", "none twice"),
        ("rank,node,device\n0,2,1\n", "no device 1 on a node 2"),
        ("rank,device\n0,2\n", "first line"),
        ("rank,node,device\n0,x,0\n", "three whole numbers"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=match):
            read_rank_file(path, cluster, 3)


def test_training_is_the_same_wherever_the_ranks_are(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    make_plan(path, pp=2, dp=2, num_microbatches=2, num_steps=2, overrides={"num_hidden_layers": 2})
    there = run_ranks(work_as, 4, str(path), [0, 1, 2, 3])
    moved = run_ranks(work_as, 4, str(path), [3, 0, 2, 1])
    assert there[0]["losses"] == moved[0]["losses"]
    assert (
        there[1:] == moved[1:] == [None] * 3
    )  # the launcher's first rank has the record, whatever its place
    places = [(rank["pipeline_rank"], rank["replica"]) for rank in moved[0]["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def work_as(rank: int, num_ranks: int, path: str, devices: list[int]) -> dict | None:
    from stagewright.execution.options import RunOptions
    from stagewright.execution.record import load_record
    from stagewright.execution.worker import work

    out = Path(path).parent
    work(RunOptions(path, None, 2, out, "cpu", True, 60.0, ranks=devices, is_checked=True))
    return load_record(Path(path).with_name("record.json")).model_dump() if rank == 0 else None


@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_ranks_around_a_slow_link_are_faster(tmp_path: Path) -> None:
    """Real links: three hosts, of which two are joined 25 times slower; the plan is measured against hosts in order."""
    plan = planned(load_cluster(hosts_file(tmp_path, 3, (0, 1))))
    plan.save(tmp_path / "placed.json")
    plan.model_copy(update={"devices": ()}).save(tmp_path / "in-order.json")
    with namespaces.hosts(3, "200mbit", {(0, 1): "8mbit", (1, 0): "8mbit"}) as made:
        seconds = [
            max(run_ranks(train_on_host, 3, made, str(tmp_path / name)))
            for name in ("placed.json", "in-order.json")
        ]
    assert seconds[0] < 0.7 * seconds[1], seconds


def train_on_host(rank: int, num_ranks: int, made: list[namespaces.Host], path: str) -> float:
    """Seconds of this host's fastest step."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session

    plan = load_plan(path)
    namespaces.join(made[rank], plan.rank_on(rank), num_ranks)
    session = Session(plan, torch.device("cpu"), None, random_weights=True)
    seconds = [session.train_step(step).seconds for step in range(2)]
    dist.barrier()
    return min(seconds)
