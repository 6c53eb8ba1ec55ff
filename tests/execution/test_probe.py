"""The probe measures this machine, says so in every source, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patience import Deadline, patient
from stagewright.cli.app import app
from stagewright.cluster import Cluster, load_cluster, save_cluster
from stagewright.errors import TRACEBACK, InputError, RunError
from stagewright.execution.probe import ProbeRequest, _described, _listen, probe
from stagewright.execution.probe_description import describe
from stagewright.execution.probe_measurements import Measurements, linear_fit

REQUEST = ProbeRequest("cpu", 1, 1, time_limit_s=0.2, seconds_per_figure=0.01)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(scope="module")
def probed(once: Callable[..., Any]) -> tuple[Cluster, list[tuple[str, float]]]:
    def measured() -> tuple[Cluster, list[tuple[str, float]]]:
        steps: list[tuple[str, float]] = []
        found = probe(
            "cpu", min(2, CORES), lambda what, done: steps.append((what, done)), seconds_per_figure=0.01
        )
        return found, steps

    return once("probed", measured)


def test_figures_are_those_of_a_working_machine(probed: tuple[Cluster, object]) -> None:
    cluster = probed[0]
    device = cluster.device
    assert (cluster.name, device.name, device.kind) == ("local", "local", "cpu")
    assert cluster.num_devices == min(2, CORES)
    assert 1e8 < device.matmul_flops("fp32") <= (device.peak_flops.fp32 or 0) < 1e14
    assert device.peak_flops.available() == ["fp64", "fp32", "bf16"]
    assert 1e8 < device.memory_bandwidth < 1e13
    assert 1e-8 < device.host_overhead_s < 1e-3
    assert device.launch_overhead_s == 0.0
    assert device.context_bytes > 2**20 and device.usable_bytes > 2**26
    link = cluster.nodes[0].intra_node
    assert 1e-6 < link.latency_s < 0.1
    assert 1e6 < link.bandwidth < 1e12 and 1e6 < link.collective_bandwidth < 1e12


def test_every_figure_says_that_it_was_measured(probed: tuple[Cluster, object]) -> None:
    group = probed[0].nodes[0]
    for part in (group, group.device, group.intra_node, group.inter_node):
        assert all(map(part.source_of, part.figures()))
    guesses = {
        figure for figure in group.device.figures() if "guess" in (group.device.source_of(figure) or "")
    }
    assert guesses == {"reserve_fraction"}
    source = group.device.source_of("memory_bandwidth") or ""
    assert source.startswith("measured by stagewright probe on 20")
    assert f"torch {torch.__version__}" in source and group.device.vendor in source


def test_progress_names_every_phase_once_and_ends_done(
    probed: tuple[object, list[tuple[str, float]]],
) -> None:
    steps = probed[1]
    assert steps[0] == ("start", 0.0) and steps[-1] == ("done", 1.0)
    assert [done for _, done in steps] == sorted({done for _, done in steps})
    assert {"matmuls", "memory bandwidth", "attention", "messages"} <= {what for what, _ in steps}


def test_the_result_is_a_cluster_file(probed: tuple[Cluster, object], tmp_path: Path) -> None:
    save_cluster(probed[0], tmp_path / "local.toml", "probed by a test")
    assert load_cluster(tmp_path / "local.toml") == probed[0]


def test_running_out_of_time_says_where_and_ends_every_process() -> None:
    deadline = Deadline(20)
    with pytest.raises(RunError, match=r"did not finish within 0.2 s \(rank 0 in 'start'"):
        probe("cpu", 1, time_limit_s=0.2)
    assert deadline
    assert multiprocessing.active_children() == []


def test_what_comes_forward_is_let_finish_behind_its_time() -> None:
    """Its figures come when its time has been over for half a second."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(("phase", ("attention", 0.5)))
    threading.Timer(0.6, sender.send, [("found", "figures")]).start()
    request = replace(REQUEST, time_limit_s=60.0)
    assert _listen([receiver], time.monotonic() + 0.1, request, lambda what, done: None) == ["figures"]


def test_a_machine_with_other_work_is_marked_and_plans_for_it_warn(
    probed: tuple[Cluster, object], tmp_path: Path
) -> None:
    busy = probed[0].model_copy(update={"cores_of_others": 1.5})
    save_cluster(busy, tmp_path / "busy.toml", "probed by a test")
    assert load_cluster(tmp_path / "busy.toml").cores_of_others == 1.5
    job = ("--global-batch", "1", "--sequence-length", "8", "--dtype", "fp32")
    done = CliRunner().invoke(app, ["estimate", "tiny-llama", "--cluster", str(tmp_path / "busy.toml"), *job])
    assert done.exit_code == 0 and "other processes used 1.5 of the cores" in done.stderr


def test_a_failing_process_is_named_with_its_reason() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(("phase", ("attention", 0.5)))
    sender.send(("error", "MemoryError: too large"))
    with pytest.raises(
        RunError, match=r"rank 0 of the probe failed during 'attention': MemoryError: too large$"
    ):
        _listen([receiver], time.monotonic() + 5, REQUEST, lambda what, done: None)


def test_an_error_is_one_line_unless_its_traceback_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        raise ValueError("too large\nsecond line")
    except ValueError as error:
        monkeypatch.delenv(TRACEBACK, raising=False)
        assert _described(error) == "ValueError: too large"
        monkeypatch.setenv(TRACEBACK, "1")
        assert "Traceback" in _described(error) and "second line" in _described(error)


def test_the_command_says_how_to_allow_more_time() -> None:
    done = CliRunner().invoke(app, ["probe", "--timeout", "1"])
    assert done.exit_code == 1
    assert "did not finish within 1 s" in done.stderr and "--timeout" in done.stderr
    assert multiprocessing.active_children() == []


def test_under_a_launcher_the_number_of_processes_is_not_ours() -> None:
    done = CliRunner().invoke(app, ["probe", "--cluster", "--processes", "2"])
    assert done.exit_code == 2 and "leave out --processes" in done.stderr


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted by /proc")
def test_ctrl_c_ends_every_process_quietly() -> None:
    code = (
        "import signal, sys; from stagewright import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts deaf to it
        "sys.argv = ['stagewright', 'probe']; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        deadline = Deadline(60)
        while len(children.read_text().split()) < 3:  # two ranks, and what tracks shared resources
            assert process.poll() is None and deadline
            time.sleep(0.05)
        time.sleep(0.5)  # both are at work on their imports
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, shown = process.communicate(timeout=patient(20))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, shown) == (130, "", "")
    deadline = Deadline(10)
    with pytest.raises(ProcessLookupError):  # no rank is left
        while deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_a_process_that_vanishes_is_named() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(("phase", ("matmuls", 0.5)))
    sender.close()
    with pytest.raises(RunError, match="rank 0 of the probe ended during 'matmuls'"):
        _listen([receiver], time.monotonic() + 5, REQUEST, lambda what, done: None)


@pytest.mark.parametrize(
    ("device", "processes", "words"),
    [("tpu", 1, "choose 'cpu' or 'cuda'"), ("cpu", 0, "choose 1 to"), ("cpu", 10_000, "core")],
)
def test_impossible_requests_teach(device: str, processes: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        probe(device, processes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"has 0 CUDA device\(s\).*probe the cpu"):
        probe("cuda")


HOST_S = 1e-6


def synthetic(rate: float, overhead_s: float, latency_s: float, bandwidth: float) -> Measurements:
    sizes = [2.0 * n**3 for n in (64, 256, 1024)]
    return Measurements(
        matmul_seconds={"fp32": [(flop, HOST_S + overhead_s + flop / rate) for flop in sizes]},
        stream_bandwidths={"copy": 8e9, "triad": 1e10, "multiply": 9e9},
        host_overhead_s=HOST_S,
        attention_flops=rate / 4,
        attention_backward_flops=rate / 8,
        host_link_bandwidth=4e9,
        context_bytes=2**20,
        reference_s=1e-3,
        message_seconds=[(4.0, latency_s), *((n, latency_s + n / bandwidth) for n in (1e5, 1e6, 1e7))],
        ring_bandwidth=bandwidth / 2,
    )


def test_description_recovers_what_was_put_in() -> None:
    found = [synthetic(rate, 1e-4, 5e-5, 2e9) for rate in (9e10, 1e11, 1.1e11)]
    cluster = describe(found, "cpu", threads=1)
    device, link = cluster.device, cluster.nodes[0].intra_node
    assert device.matmul_flops("fp32") == pytest.approx(1e11, rel=1e-6)
    assert device.matmul_half_flop == pytest.approx(1e11 * 1e-4, rel=1e-6)
    assert device.attention_efficiency == pytest.approx(0.25, rel=1e-6)
    assert (device.memory_bandwidth, device.memory_efficiency) == (1e10, pytest.approx(0.9))
    assert link.latency_s == 5e-5 and device.reference_s == 1e-3
    assert link.bandwidth == pytest.approx(2e9) and link.ring_bandwidth == pytest.approx(1e9)


def test_a_fit_never_claims_a_negative_overhead() -> None:
    rate, overhead = linear_fit([1e6, 1e8], [1e-3, 2e-1])
    assert overhead == 0.0
    assert 5e8 <= rate <= 1e9
