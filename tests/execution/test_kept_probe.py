"""The description of a machine is kept while its hardware is the same, and leaves other programs their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagewright.cluster import Cluster, load_cluster
from stagewright.execution import kept_probe, probe_description
from stagewright.execution.kept_probe import Card, this_machine, without_used
from stagewright.execution.probe_description import describe_kinds
from stagewright.execution.probe_measurements import Measurements

GIB = 2**30


def card(name: str, total: int, used: int = 0) -> Card:
    return Card(name, total, total - used)


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of a machine with as many equal processes as asked for, every one of which is noted."""
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    made: list[tuple[str, int]] = []

    def probed(device: str, processes: int, report: object) -> Cluster:
        made.append((device, processes))
        busy = 1.5 if len(made) == 1 else None
        cluster = load_cluster(f"{processes}x-rtx3090")
        return cluster.model_copy(update={"cores_of_others": busy, "name": "local"})

    monkeypatch.setattr(kept_probe, "probe", probed)
    return made


def test_a_machine_is_measured_once_unless_it_was_busy_or_changes(
    probes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(processes: int = 2) -> bool:
        return this_machine("cuda", processes, lambda what, done: None)[1]

    cards = [card("NVIDIA GeForce RTX 3090", 24 * GIB)] * 2
    monkeypatch.setattr(kept_probe, "_cards", lambda: cards)
    assert [look(), look(), look()] == [True, True, False]  # the first was disturbed
    assert [look(1), look(1), look()] == [True, False, False]
    monkeypatch.setattr(kept_probe, "_cards", lambda: [*cards[:1], card("NVIDIA GeForce RTX 4090", 24 * GIB)])
    assert [look(), look()] == [True, False]
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert look()
    assert probes == [("cuda", 2), ("cuda", 2), ("cuda", 1), ("cuda", 2), ("cuda", 2)]


def test_memory_that_others_use_is_left_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    two = load_cluster("2x-rtx3090")
    device = two.device
    total, context = device.memory_bytes, device.context_bytes
    free = [card("NVIDIA GeForce RTX 3090", total, context)] * 2
    assert without_used(two, free) == two and without_used(two, []) is two
    desktop = [card("NVIDIA GeForce RTX 3090", total, context + 2 * GIB), free[1]]
    left = without_used(two, desktop)
    assert [left.device_of(rank).memory_bytes for rank in range(2)] == [total - 2 * GIB, total]
    assert left.num_nodes == 1
    assert left.link_between(0, 1).bandwidth == two.link_between(0, 1).bandwidth
    assert left.device_of(0).peak_flops == device.peak_flops
    assert "device 0 (NVIDIA GeForce RTX 3090): other programs use 2.00 GiB" in capsys.readouterr().err


def measured(speed: float) -> Measurements:
    flops = [(1e9 * size, 1e9 * size / speed + 1e-5) for size in (1, 4, 16)]
    return Measurements(
        matmul_seconds={"bf16": flops, "fp32": [(flop, 2 * seconds) for flop, seconds in flops]},
        stream_bandwidths={"add": speed / 100, "copy": speed / 110}, host_overhead_s=1e-5, launch_overhead_s=1e-6,
        reference_s=1e-3, attention_flops=speed / 2, attention_backward_flops=speed / 2, host_link_bandwidth=1e10,
        context_bytes=2**28, workspace_bytes=2**23,
        message_seconds=[(8.0, 1e-5), (1e6, 1.1e-4), (1e7, 1.01e-3)], ring_bandwidth=8e9,
    )  # fmt: skip


def test_cards_of_several_kinds_are_described_each_by_its_own_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"]
    sizes = [24 * GIB, 23 * GIB, 23 * GIB]
    monkeypatch.setattr(probe_description, "device_name", lambda device: names[device.index])
    monkeypatch.setattr(probe_description, "total_bytes", lambda device: sizes[device.index])
    cluster = describe_kinds([measured(6e13), measured(1.5e14), measured(1.6e14)], "cuda", 4)
    assert [cluster.device_of(rank).name for rank in range(3)] == ["rtx-3090", "rtx-4090", "rtx-4090"]
    assert [cluster.device_of(rank).memory_bytes for rank in range(3)] == sizes
    peaks = [cluster.device_of(rank).peak_flops.bf16 or 0 for rank in range(3)]
    assert peaks[0] < 7e13 < peaks[1] == peaks[2]
    assert cluster.num_nodes == 1 and cluster.link_between(0, 1).bandwidth == pytest.approx(1e10, rel=0.1)
    names[:] = names[1:2] * 3
    assert describe_kinds([measured(1e14)] * 3, "cuda", 4).is_homogeneous
