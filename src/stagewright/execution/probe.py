"""Measures this machine as a cluster: every process at once, so that shared memory and links show."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stagewright.cluster import Cluster, Device, Link, NodeGroup, PerPrecision, PerPrecisionFraction
from stagewright.errors import InputError, RunError, wants_traceback
from stagewright.execution.heap import keep_freed_memory
from stagewright.execution.interrupts import interrupts_ignored
from stagewright.execution.probe_measurements import (
    MESSAGE_PHASE,
    Measurements,
    Stopwatch,
    linear_fit,
    measure_compute,
    measure_messages,
    measure_posting,
    reference_precision,
)
from stagewright.execution.probe_operators import OperatorFigures, least_squares
from stagewright.units import parse_bytes

Progress = Callable[[str, float], None]
"""Called with what is measured now and the fraction already done."""

_RESERVE_FRACTION = 0.04
_HIGHEST_RATE = 1e18
_START, _MESSAGES = 0.1, 0.9
"""Parts of a probe's time at which processes have started, and at which only messages are left to measure."""


@dataclass(frozen=True)
class _Request:
    device_type: str
    processes: int
    threads: int
    time_limit_s: float
    seconds_per_figure: float

    @property
    def world(self) -> int:
        """Processes to start: on a CPU a lone rank gets a silent neighbour, so that messages can be timed."""
        return max(2, self.processes) if self.device_type == "cpu" else self.processes


def probe(
    device: str = "cpu",
    processes: int = 1,
    progress: Progress | None = None,
    time_limit_s: float = 180.0,
    seconds_per_figure: float = 0.2,
) -> Cluster:
    """A one-node cluster of `processes` devices named `local`, measured here while all of them work at once.

    `device` is `cpu` (each process gets an equal share of cores and memory) or `cuda` (one GPU each). Takes
    about fifteen seconds on a CPU. Raises `InputError` for what this machine does not have, and `RunError` if a
    process fails or `time_limit_s` passes; no process outlives the call.
    """
    request = _checked(device, processes, time_limit_s, seconds_per_figure)
    found = _run_workers(request, progress or (lambda what, fraction: None))
    return describe(found[: request.processes], request.device_type, request.threads)


def _checked(device: str, processes: int, time_limit_s: float, seconds_per_figure: float) -> _Request:
    if device not in ("cpu", "cuda"):
        raise InputError(f"cannot probe device '{device}': choose 'cpu' or 'cuda'")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available = torch.cuda.device_count() if device == "cuda" else cores
    if not 1 <= processes <= available:
        unit = "CUDA device(s)" if device == "cuda" else "core(s)"
        raise InputError(
            f"cannot probe {processes} process(es): this machine has {available} {unit}; "
            f"choose 1 to {available}" + (", or probe the cpu" if device == "cuda" else "")
        )
    return _Request(device, processes, max(1, cores // processes), time_limit_s, seconds_per_figure)


# The parent: starts the workers, listens, and ends them whatever happens.


def _run_workers(request: _Request, progress: Progress) -> list[Measurements]:
    context = mp.get_context("spawn")
    workers, pipes = [], []
    deadline = time.monotonic() + request.time_limit_s
    with tempfile.TemporaryDirectory(prefix="stagewright-probe-") as folder:
        try:
            with interrupts_ignored():
                for rank in range(request.world):
                    receiver, sender = context.Pipe(duplex=False)
                    worker = context.Process(
                        target=_worker, args=(rank, request, str(Path(folder) / "store"), sender), daemon=True
                    )
                    worker.start()
                    sender.close()  # so that the end of the worker is the end of the pipe
                    workers.append(worker)
                    pipes.append(receiver)
            found = _listen(pipes, deadline, request, progress)
            for worker in workers:
                worker.join(timeout=2.0)
            return found
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _listen(
    pipes: list[Connection], deadline: float, request: _Request, progress: Progress
) -> list[Measurements]:
    phase = dict.fromkeys(range(len(pipes)), "start")
    found: dict[int, Measurements] = {}
    progress("start", 0.0)
    while len(found) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stuck = ", ".join(f"rank {rank} in '{phase[rank]}'" for rank in phase if rank not in found)
            raise RunError(
                f"the probe did not finish within {request.time_limit_s:g} s ({stuck}): "
                "allow more time (--timeout), or probe fewer processes"
            )
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RunError(
                    f"rank {rank} of the probe ended during '{phase[rank]}' without a word"
                ) from None
            if kind == "phase":
                phase[rank], done = value
                if rank == 0:
                    progress(phase[rank], _START + (_MESSAGES - _START) * done)
            elif kind == "found":
                found[rank] = value
            else:
                raise RunError(f"rank {rank} of the probe failed during '{phase[rank]}': {value}")
    progress("done", 1.0)
    return [found[rank] for rank in range(len(pipes))]


# A worker: enters each phase together with its peers, so that every figure is taken under the load of all.


def _worker(rank: int, request: _Request, store_path: str, pipe: Connection) -> None:
    try:
        device = _prepare(rank, request, store_path)
        meet = dist.barrier if request.processes == request.world else _alone
        watch = Stopwatch(device, request.seconds_per_figure, meet)
        found = Measurements()
        if rank < request.processes:
            measure_compute(watch, found, lambda what, done: pipe.send(("phase", (what, done))))
        dist.barrier()
        pipe.send(("phase", (MESSAGE_PHASE, 1.0)))
        measure_messages(watch, found)
        if request.processes == request.world:
            measure_posting(watch, found)
        dist.barrier()
        pipe.send(("found", found))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(("error", _described(error)))
    finally:
        pipe.close()


def _described(error: Exception) -> str:
    """On one line, unless all of it was asked for."""
    if wants_traceback():
        return "\n" + "".join(traceback.format_exception(error))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no further word'}"


def _alone() -> None:
    """Whoever measures alone has nobody to wait for."""


def _prepare(rank: int, request: _Request, store_path: str) -> torch.device:
    keep_freed_memory()  # as the processes of a run do
    torch.set_num_threads(request.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if request.device_type == "cuda":
        torch.cuda.set_device(rank)
        if request.world > 1:
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=request.world,
        timeout=timedelta(seconds=request.time_limit_s),
    )
    return torch.device("cpu" if request.device_type == "cpu" else f"cuda:{rank}")


# From the figures of all processes to a description.


def describe(
    found: list[Measurements], device_type: str, threads: int, num_devices: int | None = None
) -> Cluster:
    """The node of equal devices that its processes' measurements agree on: the median of each figure.

    `num_devices` of the node, where `found` is not of one node only.
    """
    num_devices = num_devices or len(found)
    source = source_text(device_type, num_devices, threads)
    figures = {
        **_arithmetic(found, device_type),
        **_memory(found),
        "memory_bytes": _memory_bytes(device_type, num_devices),
        "launch_overhead_s": _median(found, "launch_overhead_s"),
        "host_overhead_s": _median(found, "host_overhead_s"),
    }
    operators = [one.operators for one in found if one.operators is not None]
    if operators:
        figures |= _operators(operators, figures)
    posting = [one.message_overhead_s for one in found if one.message_overhead_s is not None]
    if posting:
        figures["message_overhead_s"] = statistics.median(posting)
    guess = "guess: room for fragmentation and communication buffers"
    device = Device(
        name="local",
        vendor=_processor(device_type),
        kind="cpu" if device_type == "cpu" else "cuda",
        reserve_fraction=_RESERVE_FRACTION,
        sources={**dict.fromkeys(figures, source), "reserve_fraction": guess},
        **figures,
    )
    return _one_node(device, num_devices, _link(found, device.memory_bandwidth, source), source)


def _median(found: list[Measurements], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)


def _arithmetic(found: list[Measurements], device_type: str) -> dict[str, Any]:
    """Peaks are the best rates seen; efficiencies and half-saturation size come from fitted curves."""
    precisions = list(found[0].matmul_seconds)
    curves = {name: [_rate_and_ramp(one, name) for one in found] for name in precisions}
    rates = {name: statistics.median(rate for rate, _ in curves[name]) for name in precisions}
    peaks = {name: max(rates[name], _best_rate(found, name)) for name in precisions}
    reference = reference_precision(device_type, precisions)
    half = next(
        (name for name in ("bf16", "fp16") if name in rates), reference
    )  # as `Device.matmul_seconds` reads it
    return {
        "peak_flops": PerPrecision(**peaks),
        "matmul_efficiency": PerPrecisionFraction(**{name: rates[name] / peaks[name] for name in precisions}),
        "matmul_half_flop": rates[half] * statistics.median(ramp for _, ramp in curves[reference]),
        "attention_efficiency": min(1.0, _median(found, "attention_flops") / peaks[reference]),
        "attention_backward_efficiency": min(
            1.0, _median(found, "attention_backward_flops") / peaks[reference]
        ),
    }


def _rate_and_ramp(found: Measurements, precision: str) -> tuple[float, float]:
    """FLOP/s of large products, and the seconds that each takes beyond that and beyond any operator's overhead.

    Of square products on the same operands over and over, or, where they were timed, of those of a step, whose operands
    come from farther away.
    """
    if found.operators and precision == "fp32":
        overhead, per_flop = found.operators.product_s, found.operators.flop_s
    else:
        timed = found.matmul_seconds[precision]
        overhead, per_flop = least_squares(
            [(1.0, flop) for flop, _ in timed], [seconds for _, seconds in timed]
        )
    common = found.launch_overhead_s or found.host_overhead_s
    return 1 / max(per_flop, 1 / _HIGHEST_RATE), max(overhead - common, 0.0)


def _memory(found: list[Measurements]) -> dict[str, Any]:
    """The bandwidth is that of the best streaming kernel, the efficiency that of the middle one."""
    streams = [list(one.stream_bandwidths.values()) for one in found]
    best = statistics.median(max(rates) for rates in streams)
    return {
        "memory_bandwidth": best,
        "memory_efficiency": min(1.0, statistics.median(statistics.median(r) for r in streams) / best),
        "context_bytes": int(_median(found, "context_bytes")),
        "workspace_bytes": int(_median(found, "workspace_bytes")),
        "host_link_bandwidth": _median(found, "host_link_bandwidth"),
    }


def _operators(found: list[OperatorFigures], figures: dict[str, Any]) -> dict[str, Any]:
    """What only a CPU's operators in a step tell."""

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    streamed = figures["memory_bandwidth"] * figures["memory_efficiency"]
    speed_up = max(1.0, median("cache_bandwidth") / streamed)
    names = "view_overhead_s", "attention_overhead_s", "function_rate", "random_rate", "scatter_rate"
    return {
        **{name: median(name) for name in names},
        "packing_bandwidth": 1 / max(median("packed_byte_s"), 1 / _HIGHEST_RATE),
        "norm_efficiency": min(1.0, median("norm_bandwidth") / (figures["memory_bandwidth"] * speed_up)),
        "cache_bytes": _cache_bytes(),
        "cache_speed_up": speed_up,
    }


def _best_rate(found: list[Measurements], precision: str) -> float:
    return statistics.median(max(flop / s for flop, s in one.matmul_seconds[precision]) for one in found)


def _link(found: list[Measurements], memory_bandwidth: float, source: str) -> Link:
    timed = [one.message_seconds for one in found if one.message_seconds]
    if not timed:
        note = "guess: one device, so no link to measure; half of its measured memory bandwidth"
        return Link(
            latency_s=0.0, bandwidth=memory_bandwidth / 2, sources={"latency_s": note, "bandwidth": note}
        )
    fits = [linear_fit(*zip(*pairs[1:], strict=True)) for pairs in timed]
    rings = [one.ring_bandwidth for one in found if one.ring_bandwidth]
    return Link(
        # The smallest message is all latency; the fit over the large ones would only extrapolate to it.
        latency_s=statistics.median(pairs[0][1] for pairs in timed),
        bandwidth=statistics.median(rate for rate, _ in fits),
        ring_bandwidth=statistics.median(rings),
        sources=dict.fromkeys(("latency_s", "bandwidth", "ring_bandwidth"), source),
    )


def _one_node(device: Device, count: int, link: Link, source: str) -> Cluster:
    unmeasured = dict.fromkeys(link.sources, "guess: one node, so no network to measure; as inside the node")
    group = NodeGroup(
        devices_per_node=count,
        num_nics=1,
        device=device,
        intra_node=link,
        inter_node=link.model_copy(update={"sources": unmeasured}),
        sources={"devices_per_node": source, "num_nics": "guess: one node, so no network to measure"},
    )
    return Cluster(name="local", nodes=(group,))


def source_text(device_type: str, processes: int, threads: int) -> str:
    """Where a measured figure comes from."""
    load = f"{processes} process{'es' if processes > 1 else ''} at once"
    if device_type == "cpu":
        load += f", {threads} thread{'s' if threads > 1 else ''} each"
    return (
        f"measured by stagewright probe on {date.today().isoformat()}, torch {torch.__version__}, "
        f"{_processor(device_type)}, {load}"
    )


def _processor(device_type: str) -> str:
    if device_type == "cuda":
        return torch.cuda.get_device_name(0)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cache_bytes() -> int | None:
    """The last-level cache; None where the system does not say."""
    levels = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        return max((parse_bytes(f"{level.read_text().strip()}iB") for level in levels), default=None)
    except (OSError, InputError):
        return None


def _memory_bytes(device_type: str, processes: int) -> int:
    """What one device may use: a GPU's memory, or an equal share of the machine's (or its container's)."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = "max"
    return min(total, int(limit) if limit.isdigit() else total) // processes
