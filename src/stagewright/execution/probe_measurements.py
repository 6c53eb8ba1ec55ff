"""Measurements of one process of a probe: medians of warmed-up, time-boxed repetitions, in step with its peers."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.clock import moment, synchronize, undelayed_s
from stagewright.execution.probe_operators import (
    SIZES,
    OperatorFigures,
    ReferenceNetwork,
    faster_half,
    fitted,
    host_figures,
)
from stagewright.execution.reference import Reference
from stagewright.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MATMUL_SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
MESSAGE_BYTES = (4, 64 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STREAM_BYTES = {"cpu": 96 * MIB, "cuda": 512 * MIB}
"""Bytes of each operand: far larger than the caches, so that the figure is that of the memory."""
ATTENTION_SHAPE = (4, 16, 2048, 128)
"""Batch, heads, sequence, head width."""
BACKWARD_FLOP_RATIO = 2.5
_MIN_SAMPLES, _SAMPLE_S = 3, 1e-3
_LONG_S = 0.1
"""Seconds from which a CPU's call is timed once per box without warm-up: matmuls in a dtype without hardware instructions
take seconds."""
_POSTS = 16
"""Number of messages that are posted while a CPU computes."""
_NETWORK_BOXES = 5
"""Number of time boxes of each reference network, in place of as many figures."""


@dataclass
class Measurements:
    """Figures of one process, in seconds, bytes and FLOP/s. Matmuls are (FLOP, seconds) pairs per precision, including the
    overhead that every operator has.
    """

    matmul_seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    stream_bandwidths: dict[str, float] = field(default_factory=dict)
    host_overhead_s: float = 0.0
    view_overhead_s: float | None = None
    """Seconds of a view on a GPU; a CPU's are in `operators`."""
    launch_overhead_s: float = 0.0
    reference_s: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    operators: OperatorFigures | None = None
    """Figures of operators in a step, on a CPU only."""
    host_link_bandwidth: float = 0.0
    context_bytes: int = 0
    workspace_bytes: int = 0
    message_overhead_s: float | None = None
    """Seconds to post a message, on a CPU only."""
    message_seconds: list[tuple[float, float]] = field(default_factory=list)
    """(Bytes, seconds) of messages to a neighbour; empty without a neighbour."""
    ring_bandwidth: float | None = None


def linear_fit(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit (rate, overhead) of `seconds = overhead + amounts / rate` by least squares of the relative error, overhead >= 0.

    >>> rate, overhead = linear_fit([1e6, 1e7, 1e8], [2e-3, 11e-3, 101e-3])
    >>> round(rate / 1e9, 6), round(overhead, 6)
    (1.0, 0.001)
    """
    x, t = np.asarray(amounts, float), np.asarray(seconds, float)
    columns = np.stack([x / t, 1 / t], axis=1)
    (inverse_rate, overhead), *_ = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)
    if overhead < 0:
        overhead, inverse_rate = 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
    return 1 / max(float(inverse_rate), float(np.min(t / np.maximum(x, 1.0))) / 2), float(overhead)


class Stopwatch:
    """A timer of calls on one device, each for about `time_box_s`: by the host's clock on a CPU, by events on a GPU.

    `meet` is called before every figure, so that all processes measure it at the same time.
    """

    def __init__(
        self, device: torch.device, time_box_s: float, meet: Callable[[], object] = lambda: None
    ) -> None:
        self.device = device
        self.time_box_s = time_box_s
        self.meet = meet
        self._samples: defaultdict[str, list[float]] = defaultdict(list)

    @cached_property
    def networks(self) -> list[ReferenceNetwork]:
        """Networks whose operators are timed in place."""
        return [ReferenceNetwork(width, length) for width, length in SIZES]

    def seconds(self, what: str, call: Callable[[], object]) -> float:
        """Return the seconds of one `call`, warmed up, from samples long enough for the clock, of this and earlier boxes.

        On a GPU this is the median. On a CPU it is the mean of the faster half: other programs on a shared machine may
        halve the speed of a core for seconds, and a profile describes the machine without them.
        """
        self.meet()
        samples = self._samples[what]
        first = self._sample(call, 1)
        if self.device.type == "cpu" and first > _LONG_S:
            samples.append(first)
        else:
            call()
            once = max(self._sample(call, 1), 1e-9)
            repeats = max(1, int(_SAMPLE_S / once))
            end, least = time.perf_counter() + self.time_box_s, len(samples) + _MIN_SAMPLES
            while len(samples) < least or time.perf_counter() < end:
                samples.append(self._sample(call, repeats) / repeats)
        if self.device.type == "cpu":
            return statistics.fmean(faster_half(samples, float))
        return statistics.median(samples)

    def _sample(self, call: Callable[[], object], repeats: int) -> float:
        if self.device.type == "cpu":
            began = moment()
            for _ in range(repeats):
                call()
            return undelayed_s(began)
        accelerator = accelerator_of(self.device)
        begin = accelerator.mark()
        for _ in range(repeats):
            call()
        end = accelerator.mark()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def supported_precisions(device: torch.device) -> dict[str, torch.dtype]:
    """Return the precisions with native matmuls on a device, by their short names (tf32 is fp32 storage)."""
    if device.type == "cpu":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    precisions = {"fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
    if accelerator_of(device).has_bf16_matmuls:
        precisions |= {"bf16": torch.bfloat16, "tf32": torch.float32}
    return precisions


@contextmanager
def _fp32_arithmetic(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_host(watch: Stopwatch, figures: Measurements) -> None:
    """Measure a GPU's costs per operator: of issuing an operator or a view from the host as the executor does, and of the
    gap between kernels inside a graph."""
    device = watch.device
    if device.type == "cpu":
        return
    network = ReferenceNetwork(*SIZES[0], device)
    network.run(watch.time_box_s)
    figures.host_overhead_s, figures.view_overhead_s = host_figures(network.samples())
    x, count = torch.ones(1, device=device), 200
    replay = accelerator_of(device).captured(lambda: [x.add_(1) for _ in range(count)])
    figures.launch_overhead_s = watch.seconds("replay", replay) / count


def measure_reference(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the reference computation, which runs repeat; on a CPU, take its time while operators were timed, when the
    machine was equally slow."""
    if watch.device.type == "cpu":
        figures.reference_s = watch.networks[-1].reference_s
        return
    figures.reference_s = watch.seconds("reference", Reference(watch.device))


def measure_matmul(watch: Stopwatch, figures: Measurements) -> None:
    """Measure square matmuls of every size and precision."""
    device = watch.device
    for name, dtype in supported_precisions(device).items():
        pairs = []
        with _fp32_arithmetic(name):
            for size in MATMUL_SIZES[device.type]:
                a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
                call = partial(torch.mm, a, b, out=torch.empty_like(a))
                pairs.append((2.0 * size**3, watch.seconds(f"{name} matmul {size}", call)))
        figures.matmul_seconds[name] = pairs


def measure_streams(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the bandwidth of kernels that only stream memory, and of copies between host and device."""
    device = watch.device
    a, b, c = (torch.ones(STREAM_BYTES[device.type] // 4, device=device) for _ in range(3))
    size = a.numel() * a.element_size()
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: c.copy_(a)),
        "triad": (3, lambda: torch.add(a, b, alpha=2.0, out=c)),
        "multiply": (3, lambda: torch.mul(a, b, out=c)),
        "relu": (2, lambda: torch.clamp_min(a, 0.0, out=c)),
    }
    figures.stream_bandwidths = {
        name: operands * size / watch.seconds(name, call) for name, (operands, call) in calls.items()
    }
    if device.type == "cpu":
        figures.host_link_bandwidth = figures.stream_bandwidths["copy"] / 2
    else:
        pinned = accelerator_of(device).host_empty(a.shape, a.dtype).fill_(1.0)
        down = watch.seconds("down", lambda: pinned.copy_(a, non_blocking=True))
        up = watch.seconds("up", lambda: a.copy_(pinned, non_blocking=True))
        figures.host_link_bandwidth = size / max(down, up)


def measure_operators(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the times of a CPU's operators in place in a step."""
    if watch.device.type != "cpu":
        return
    for network in watch.networks:
        watch.meet()
        network.run(_NETWORK_BOXES * watch.time_box_s)
    operators = fitted([sample for network in watch.networks for sample in network.samples()])
    figures.operators = operators
    figures.host_overhead_s = operators.host_overhead_s
    figures.attention_flops = operators.attention_flops
    figures.attention_backward_flops = operators.attention_backward_flops


def measure_attention(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the FLOP/s of a GPU's fused attention, forward and backward, counting all computed FLOP."""
    device = watch.device
    if device.type == "cpu":
        return
    batch, heads, length, width = ATTENTION_SHAPE
    dtype = supported_precisions(device)[reference_precision(device.type, supported_precisions(device))]
    shape = (batch, heads, length, width)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    flop = 4.0 * batch * heads * length**2 * width
    with torch.no_grad():
        forward = watch.seconds("attention", lambda: F.scaled_dot_product_attention(q, k, v))
    figures.attention_flops = flop / forward
    out = F.scaled_dot_product_attention(q, k, v)
    seed = torch.ones_like(out)
    backward = watch.seconds("backward", lambda: torch.autograd.grad(out, (q, k, v), seed, retain_graph=True))
    figures.attention_backward_flops = BACKWARD_FLOP_RATIO * flop / backward


def reference_precision(device_type: str, names: dict[str, torch.dtype] | Sequence[str]) -> str:
    """Return the precision that training on a device uses most; it decides the half-saturation size and attention's peak."""
    if device_type == "cpu":
        return "fp32"
    return "bf16" if "bf16" in names else "fp16"


def measure_memory(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the memory outside the allocator, and the workspace that the first matmul takes from it."""
    device, accelerator = watch.device, accelerator_of(watch.device)
    if device.type == "cpu":  # interpreter and libraries, before any large tensor
        figures.context_bytes = figures.context_bytes or accelerator.reserved_bytes()
        return
    a = torch.ones(256, 256, device=device)
    before = accelerator.allocated_bytes()
    out = a @ a
    figures.workspace_bytes = accelerator.allocated_bytes() - before - out.numel() * out.element_size()
    free, total = accelerator.free_and_total_bytes()
    figures.context_bytes = total - free - accelerator.reserved_bytes()


def measure_messages(watch: Stopwatch, figures: Measurements) -> None:
    """Measure half round trips with the neighbour (0 with 1, 2 with 3, ... at the same time) at several sizes.

    Every rank makes the same number of trips: a rank that stopped on its own clock would leave its peer waiting. The
    figure is the fastest tenth, not the median: on a shared machine a waiting process often wakes one time slice of the
    scheduler (milliseconds) late, which is no property of the link.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    for size in MESSAGE_BYTES:
        if peer < world:
            buffer = torch.zeros(size, dtype=torch.uint8, device=watch.device)
            trips = 200 if size < MIB else max(5, 40 * MIB // size)
            seconds = [_round_trip(buffer, rank, peer) for _ in range(trips + 3)][3:]
            figures.message_seconds.append((float(size), sorted(seconds)[len(seconds) // 10] / 2))
    if world > 1:
        figures.ring_bandwidth = _ring_bandwidth(watch.device, world)


def measure_posting(watch: Stopwatch, figures: Measurements) -> None:
    """Measure the time to post the buffer of a small message, or to send one, on a CPU that runs a step in between and so
    has neither code nor data in its cache. Every rank must call this.
    """
    peer = dist.get_rank() ^ 1
    if watch.device.type != "cpu" or peer >= dist.get_world_size():
        return
    samples = []
    for tag in range(_POSTS):
        posting = moment()
        received = dist.irecv(torch.empty(1), peer, tag=tag)
        posted = undelayed_s(posting)
        watch.networks[-1].step()
        sending = moment()
        sent = dist.isend(torch.empty(1), peer, tag=tag)
        samples.append((posted + undelayed_s(sending)) / 2)
        watch.networks[-1].step()
        for work in (received, sent):
            assert work is not None, "every rank is in the group of all"
            work.wait()
    figures.message_overhead_s = statistics.fmean(faster_half(samples, float))


def _round_trip(buffer: torch.Tensor, rank: int, peer: int) -> float:
    ways = (dist.send, dist.recv)
    synchronize(buffer.device)
    start = time.perf_counter()
    for way in ways if rank < peer else reversed(ways):
        way(buffer, peer)
    synchronize(buffer.device)
    return time.perf_counter() - start


def _ring_bandwidth(device: torch.device, world: int) -> float:
    """Return the bytes/s per rank and direction of a large all-reduce, which moves 2 (n - 1) / n of the buffer."""
    buffer = torch.zeros(16 * MIB // 4, device=device)
    samples = [seconds_together(lambda: dist.all_reduce(buffer), device) for _ in range(12)]
    return 2 * (world - 1) / world * 16 * MIB / statistics.median(samples[2:])


def seconds_together(
    call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds of one `call` that all ranks of `group` make at the same time."""
    dist.barrier(group)
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


_PHASES: dict[str, Callable[[Stopwatch, Measurements], None]] = {
    "memory": measure_memory,
    "operator overhead": measure_host,
    "operators in place": measure_operators,
    "reference": measure_reference,
    "matmuls": measure_matmul,
    "memory bandwidth": measure_streams,
    "attention": measure_attention,
}
MESSAGE_PHASE = "messages"
_CPU_ROUNDS = 4
"""Number of times that every figure of a CPU is measured, each time in a part of its time box, since other programs on a
shared machine may slow down all of one box."""


def measure_compute(
    watch: Stopwatch, figures: Measurements, progress: Callable[[str, float], object]
) -> None:
    """Measure everything that needs no messages, in step with all processes; `progress` receives each phase and the
    fraction done."""
    rounds = _CPU_ROUNDS if watch.device.type == "cpu" else 1
    watch.time_box_s /= rounds
    for number in range(rounds):
        for index, (name, measure) in enumerate(_PHASES.items()):
            progress(name, (number + index / len(_PHASES)) / rounds)
            watch.meet()
            measure(watch, figures)
