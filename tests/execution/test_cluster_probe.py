"""The probe of a cluster: all pairs in disjoint rounds, and a slow link that is found where it was planted."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import nccl_simulation
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import namespaces
from multiprocess import run_ranks
from stagewright.cli.app import app
from stagewright.cluster import Cluster, load_cluster, save_cluster
from stagewright.execution.links import LinkCurve, rounds
from stagewright.report.clusters import links_summary


@given(st.lists(st.integers(1, 4), min_size=1, max_size=7))
def test_rounds_meet_every_pair_once_and_no_node_twice(sizes: list[int]) -> None:
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    found = rounds(nodes)
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(range(sum(sizes)), 2))
    for pairs in found:
        met = [node for pair in pairs for node in {node_of[rank] for rank in pair}]
        assert len(met) == len(set(met))


def test_a_curve_gives_latency_and_bandwidth() -> None:
    points = tuple((float(size), 2e-4 + size / 1e8) for size in (4, 2**16, 2**20, 2**22))
    curve = LinkCurve(0, 1, points)
    assert curve.latency_s == pytest.approx(1e-4, rel=1e-3)
    assert curve.bandwidth == pytest.approx(1e8, rel=1e-3)


def test_without_a_launcher_the_probe_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["probe", "--cluster"])
    assert result.exit_code != 0 and "torchrun" in result.stderr


@pytest.mark.multiprocess
def test_links_are_measured_over_a_communicator_at_a_time() -> None:
    """Under NCCL's rules: each pair has one, both of whose directions are connected before anything is timed, and which is
    gone before the next pair's."""
    for rank, (peers, num_groups) in enumerate(run_ranks(measure_in_order, 3, timeout=90)):
        assert peers == [other for other in range(3) if other != rank]
        assert num_groups == {2}  # with the default group


def measure_in_order(rank: int, num_ranks: int) -> tuple[list[int], set[int]]:
    import torch
    import torch.distributed as dist

    from stagewright.execution import links

    num_groups: set[int] = set()
    round_trip = links._round_trip

    def counting(buffer: torch.Tensor, receiver: int, group: dist.ProcessGroup | None) -> float:
        if buffer.numel() == links.MESSAGE_BYTES[0]:
            num_groups.add(len(dist.distributed_c10d._world.pg_map))
        return round_trip(buffer, receiver, group)

    links._round_trip = counting
    links._MOST_REPEATS, links.MESSAGE_BYTES = 3, (4, 256, 1024)
    nccl_simulation.register()
    dist.init_process_group(nccl_simulation.BACKEND)
    curves = links.measure_links([[0, 1], [2]], torch.device("cpu"), 0.001)
    assert all(curve.sender == rank and len(curve.points) == 3 for curve in curves)
    dist.destroy_process_group()
    return sorted(curve.receiver for curve in curves), num_groups


HOSTS, RATE, SLOW_RATE = 3, 400e6 / 8, 80e6 / 8
BASE = """
[[nodes]]
count = 3
device = "a100-80"
devices_per_node = 1
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_a_planted_slow_link_is_found_in_its_direction(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    with namespaces.hosts(HOSTS, "400mbit", {(2, 0): "80mbit"}) as made:
        found = run_ranks(probe_on_hosts, HOSTS, made, tmp_path)[0]
    save_cluster(found, tmp_path / "probed.toml", "a test")
    probed = load_cluster(tmp_path / "probed.toml")
    assert probed.measured is not None and probed.measured.between == "ranks"
    for a in range(HOSTS):
        for b in range(HOSTS):
            if a != b:
                wanted = SLOW_RATE if (a, b) == (2, 0) else RATE
                assert probed.link_between(a, b).bandwidth == pytest.approx(wanted, rel=0.4), (a, b)
    slow = [row for row in links_summary(probed).columns[1].cells if "to" in str(row)]
    assert slow == ["rank 2 to rank 0"]
    # Summed around a ring of all three, so over the slow link too: 2 * 2/3 of the buffer.
    curve = next(one for one in probed.collectives if one.operation == "all-reduce")
    assert curve.seconds[-1] > 0.8 * 4 / 3 * curve.num_bytes[-1] / RATE


def probe_on_hosts(rank: int, num_ranks: int, made: list[namespaces.Host], folder: Path) -> Any:
    import torch

    from stagewright.execution.cluster_probe import probe_cluster

    namespaces.join(made[rank], rank, num_ranks)
    found: Cluster | None = probe_cluster(torch.device("cpu"), load_cluster(folder / "base.toml"), 0.02)
    return found
