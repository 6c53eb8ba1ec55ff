"""Measurement of this machine as a cluster, by all processes at once, so that the sharing of memory and links shows."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stagewright.cluster import Cluster
from stagewright.errors import InputError, RunError, wants_traceback
from stagewright.execution import probe_measurements as measuring
from stagewright.execution.accelerator import accelerator_of, num_devices
from stagewright.execution.allocation import keep_freed_memory
from stagewright.execution.machine_use import watch_others
from stagewright.execution.probe_description import describe_kinds
from stagewright.execution.probe_measurements import Measurements, Stopwatch
from stagewright.machine import num_cores

Progress = Callable[[str, float], None]
"""Called with what is measured now and the fraction already done."""

RequestT = TypeVar("RequestT", bound="ProbeRequest")
FoundT = TypeVar("FoundT")
Measure = Callable[[int, RequestT, torch.device, Progress], FoundT]
"""A function that measures a rank's device in its process; at the top level of a module, so that it can be pickled."""

_START, _MESSAGES = 0.1, 0.9
"""Fractions of a probe's time at which processes have started, and at which only messages remain to be measured."""


@dataclass(frozen=True)
class ProbeRequest:
    """The processes of a probe, and their time limits."""

    device_type: str
    processes: int
    threads: int
    time_limit_s: float
    seconds_per_figure: float

    @property
    def world(self) -> int:
        """Number of processes to start: on a CPU a single rank gets an idle neighbour, so that messages can be timed."""
        return max(2, self.processes) if self.device_type == "cpu" else self.processes


def probe(
    device: str = "cpu",
    processes: int = 1,
    progress: Progress | None = None,
    time_limit_s: float = 180.0,
    seconds_per_figure: float = 0.2,
) -> Cluster:
    """Measure this machine as a one-node cluster of `processes` devices named `local`, with all of them working at once.

    `device` is `cpu` (each process gets an equal share of cores and memory) or `cuda` (one GPU each). Takes about fifteen
    seconds on a CPU. Raises `InputError` for devices that this machine does not have, and `RunError` if a process fails, or
    if the probe takes longer than `time_limit_s` without progress for half of that; no process outlives the call. The
    cluster records whether other programs were running meanwhile.
    """
    request = checked(device, processes, time_limit_s, seconds_per_figure)
    measure_others = watch_others()
    by_rank = run_workers(request, progress or (lambda what, fraction: None), _measure)
    try:
        cluster = describe_kinds(by_rank[: request.processes], request.device_type, request.threads)
    except ValueError as error:  # of figures that no machine has
        raise _impossible(error, measure_others()) from None
    return cluster.model_copy(update={"cores_of_others": measure_others()})


def _impossible(error: ValueError, cores_of_others: float | None) -> RunError:
    """Return the error for figures that a cluster's description rejects, since other programs disturbed the measurements."""
    used = "" if cores_of_others is None else f": other programs used {cores_of_others:.1f} cores meanwhile"
    which = "; ".join(str(error).splitlines()[:3])
    return RunError(
        f"this machine is too busy to be measured{used}. The figures are impossible ({which}): end other programs, or "
        "wait for them, and probe again"
    )


def checked(device: str, processes: int, time_limit_s: float, seconds_per_figure: float) -> ProbeRequest:
    """Return the request for a probe. Raises `InputError` for devices that this machine does not have."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"cannot probe device '{device}': choose 'cpu' or 'cuda'")
    cores = num_cores()
    available = num_devices(device) if device == "cuda" else cores
    if not 1 <= processes <= available:
        unit = "CUDA device(s)" if device == "cuda" else "core(s)"
        raise InputError(
            f"cannot probe {processes} process(es): this machine has {available} {unit}; "
            f"choose 1 to {available}" + (", or probe the cpu" if device == "cuda" else "")
        )
    return ProbeRequest(device, processes, max(1, cores // processes), time_limit_s, seconds_per_figure)


# The parent: starts the workers, listens, and ends them in any case.


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep processes that start meanwhile from importing modules of the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def run_workers(request: RequestT, progress: Progress, measure: Measure[RequestT, FoundT]) -> list[FoundT]:
    """Run `measure` in each process of `request` and return its results; no process outlives the call. Raises as `probe`."""
    context = mp.get_context("spawn")
    workers, pipes = [], []
    deadline = time.monotonic() + request.time_limit_s
    with tempfile.TemporaryDirectory(prefix="stagewright-probe-") as folder:
        try:
            with interrupts_ignored():
                for rank in range(request.world):
                    receiver, sender = context.Pipe(duplex=False)
                    worker = context.Process(
                        target=_worker,
                        args=(rank, request, str(Path(folder) / "store"), sender, measure),
                        daemon=True,
                    )
                    with _without_current_folder():
                        worker.start()
                    sender.close()  # so that the end of the worker is the end of the pipe
                    workers.append(worker)
                    pipes.append(receiver)
            by_rank = _listen(pipes, deadline, request, progress)
            for worker in workers:
                worker.join(timeout=2.0)
            return by_rank
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _listen(pipes: list[Connection], deadline: float, request: ProbeRequest, progress: Progress) -> list[Any]:
    phase = dict.fromkeys(range(len(pipes)), "start")
    by_rank: dict[int, Any] = {}
    progress("start", 0.0)
    while len(by_rank) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in by_rank]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stuck = ", ".join(f"rank {rank} in '{phase[rank]}'" for rank in phase if rank not in by_rank)
            raise RunError(
                f"the probe did not finish within {request.time_limit_s:g} s ({stuck}), and made no progress in the last "
                "half of that time: allow more time (--timeout), or probe fewer processes"
            )
        # On a busy machine everything takes longer; a probe that makes progress may finish.
        deadline = max(deadline, time.monotonic() + request.time_limit_s / 2)
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                text = f"rank {rank} of the probe ended during '{phase[rank]}' without a message"
                raise RunError(text) from None
            if kind == "phase":
                phase[rank], done = value
                if rank == 0:
                    progress(phase[rank], _START + (_MESSAGES - _START) * done)
            elif kind == "found":
                by_rank[rank] = value
            else:
                raise RunError(f"rank {rank} of the probe failed during '{phase[rank]}': {value}")
    progress("done", 1.0)
    return [by_rank[rank] for rank in range(len(pipes))]


# A worker: enters each phase together with its peers, so that every figure is measured under the load of all.


def _worker(
    rank: int, request: RequestT, store_path: str, pipe: Connection, measure: Measure[RequestT, FoundT]
) -> None:
    try:
        device = _prepare(rank, request, store_path)
        result = measure(rank, request, device, lambda what, done: pipe.send(("phase", (what, done))))
        dist.barrier()
        pipe.send(("found", result))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(("error", _described(error)))
    finally:
        pipe.close()


def _measure(rank: int, request: ProbeRequest, device: torch.device, report: Progress) -> Measurements:
    meet = dist.barrier if request.processes == request.world else lambda: None
    watch = Stopwatch(device, request.seconds_per_figure, meet)
    measurements = Measurements()
    if rank < request.processes:
        measuring.measure_compute(watch, measurements, report)
    dist.barrier()
    report(measuring.MESSAGE_PHASE, 1.0)
    measuring.measure_messages(watch, measurements)
    if request.processes == request.world:
        measuring.measure_posting(watch, measurements)
    return measurements


def _described(error: Exception) -> str:
    """Return an error in one line, or with its traceback if the user wants tracebacks."""
    if wants_traceback():
        return "\n" + "".join(traceback.format_exception(error))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _prepare(rank: int, request: ProbeRequest, store_path: str) -> torch.device:
    keep_freed_memory()  # as the processes of a run do
    torch.set_num_threads(request.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if request.device_type == "cuda":
        accelerator_of(torch.device(request.device_type, rank)).make_current()
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


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes that start in the context ignore Ctrl-C from the beginning; the caller has to end them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
