"""Description of a machine, with sources, from the measurements of all processes of a probe."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from stagewright.cluster import Cluster, Device, Link, NodeGroup, PerPrecision, PerPrecisionFraction
from stagewright.errors import InputError
from stagewright.execution.accelerator import device_name, total_bytes
from stagewright.execution.probe_measurements import Measurements, linear_fit, reference_precision
from stagewright.execution.probe_operators import OperatorFigures, least_squares
from stagewright.machine import machine_bytes
from stagewright.units import parse_bytes

_RESERVE_FRACTION = 0.04
_HIGHEST_RATE = 1e18


def describe_kinds(by_process: list[Measurements], device_type: str, threads: int) -> Cluster:
    """Return this machine as one node with a group for each run of equal GPUs, linked as all of them together were measured.

    GPUs of one kind are described by the medians of their own figures alone.
    """
    numbers = range(len(by_process))
    kinds = ["cpu" if device_type == "cpu" else device_name(torch.device(device_type, n)) for n in numbers]
    if len(set(kinds)) == 1:
        return describe(by_process, device_type, threads)
    groups: list[NodeGroup] = []
    for kind, run in groupby(numbers, key=kinds.__getitem__):
        ranks = list(run)
        (group,) = describe([by_process[rank] for rank in ranks], device_type, threads, first=ranks[0]).nodes
        device = group.device.model_copy(update={"name": _short(kind)})
        source = group.sources["devices_per_node"]
        changed = {
            "device": device, "same_node": bool(groups),
            "intra_node": _link(by_process, device.memory_bandwidth, source),
        }  # fmt: skip
        groups.append(group.model_copy(update=changed))
    return Cluster(name="local", nodes=tuple(groups))


def _short(name: str) -> str:
    """Return the name of a GPU as the catalog would write it.

    >>> _short("NVIDIA GeForce RTX 3090"), _short("AMD Radeon RX 7900 XTX")
    ('rtx-3090', 'rx-7900-xtx')
    """
    makers = ("nvidia", "geforce", "amd", "radeon", "tesla", "quadro")
    return "-".join(word for word in name.lower().split() if word not in makers) or "gpu"


def describe(
    by_process: list[Measurements],
    device_type: str,
    threads: int,
    num_devices: int | None = None,
    first: int = 0,
) -> Cluster:
    """Return a cluster of one node of equal devices with the median of each figure over the measuring processes.

    `num_devices` is the number of the node's devices, if `by_process` has those of more than one node; `first` the number of
    the first device on this machine.
    """
    num_devices = num_devices or len(by_process)
    source = source_text(device_type, num_devices, threads, first)
    figures = {
        **_arithmetic(by_process, device_type),
        **_memory(by_process),
        "memory_bytes": (
            total_bytes(torch.device(device_type, first))
            if device_type != "cpu"
            else machine_bytes()
            // num_devices  # an equal share of the memory of the machine or its container
        ),
        "launch_overhead_s": _median(by_process, "launch_overhead_s"),
        "host_overhead_s": _median(by_process, "host_overhead_s"),
        "reference_s": _median(by_process, "reference_s"),
    }
    if viewing := [
        measurements.view_overhead_s
        for measurements in by_process
        if measurements.view_overhead_s is not None
    ]:
        figures["view_overhead_s"] = statistics.median(viewing)
    if operators := [
        measurements.operators for measurements in by_process if measurements.operators is not None
    ]:
        figures |= _operators(operators, figures)
    if posting := [
        measurements.message_overhead_s
        for measurements in by_process
        if measurements.message_overhead_s is not None
    ]:
        figures["message_overhead_s"] = statistics.median(posting)
    guess = "guess: headroom for fragmentation and communication buffers"
    device = Device(
        name="local",
        vendor=processor_name(device_type, first),
        kind="cpu" if device_type == "cpu" else "cuda",
        reserve_fraction=_RESERVE_FRACTION,
        sources={**dict.fromkeys(figures, source), "reserve_fraction": guess},
        **figures,
    )
    return _one_node(device, num_devices, _link(by_process, device.memory_bandwidth, source), source)


def _median(figures: Sequence[Measurements | OperatorFigures], name: str) -> float:
    return statistics.median(getattr(entry, name) for entry in figures)


def _arithmetic(by_process: list[Measurements], device_type: str) -> dict[str, Any]:
    """Return peaks, which are the best rates seen, and efficiencies and half-saturation size from fitted curves."""
    precisions = list(by_process[0].matmul_seconds)
    curves = {
        name: [_rate_and_ramp(measurements, name) for measurements in by_process] for name in precisions
    }
    rates = {name: statistics.median(rate for rate, _ in curves[name]) for name in precisions}
    best = {
        name: statistics.median(
            max(flop / s for flop, s in measurements.matmul_seconds[name]) for measurements in by_process
        )
        for name in precisions
    }
    peaks = {name: max(rates[name], best[name]) for name in precisions}
    reference = reference_precision(device_type, precisions)
    # The precision by which `Device.matmul_seconds` reads it.
    half = next((name for name in ("bf16", "fp16") if name in rates), reference)

    def attention(name: str) -> float:
        return min(1.0, _median(by_process, name) / peaks[reference])

    return {
        "peak_flops": PerPrecision(**peaks),
        "matmul_efficiency": PerPrecisionFraction(**{name: rates[name] / peaks[name] for name in precisions}),
        "matmul_half_flop": rates[half] * statistics.median(ramp for _, ramp in curves[reference]),
        "attention_efficiency": attention("attention_flops"),
        "attention_backward_efficiency": attention("attention_backward_flops"),
    }


def _rate_and_ramp(measurements: Measurements, precision: str) -> tuple[float, float]:
    """Return the FLOP/s of large matmuls, and the seconds that each takes beyond that and beyond any operator's overhead.

    Both are of repeated square matmuls on the same operands, or, where they were timed, of the matmuls of a step, whose
    operands come from farther away.
    """
    if measurements.operators and precision == "fp32":
        overhead, per_flop = measurements.operators.matmul_s, measurements.operators.flop_s
    else:
        flops, seconds = zip(*measurements.matmul_seconds[precision], strict=True)
        overhead, per_flop = least_squares([(1.0, flop) for flop in flops], seconds)
    common = measurements.launch_overhead_s or measurements.host_overhead_s
    return 1 / max(per_flop, 1 / _HIGHEST_RATE), max(overhead - common, 0.0)


def _memory(by_process: list[Measurements]) -> dict[str, Any]:
    """Return the bandwidth of the best streaming kernel, the efficiency of the median one, and other memory figures."""
    streams = [list(measurements.stream_bandwidths.values()) for measurements in by_process]
    best = statistics.median(max(rates) for rates in streams)
    return {
        "memory_bandwidth": best,
        "memory_efficiency": min(1.0, statistics.median(statistics.median(r) for r in streams) / best),
        "context_bytes": int(_median(by_process, "context_bytes")),
        "workspace_bytes": int(_median(by_process, "workspace_bytes")),
        "host_link_bandwidth": _median(by_process, "host_link_bandwidth"),
    }


def _operators(by_process: list[OperatorFigures], figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that only a CPU's operators in a step show."""
    median = partial(_median, by_process)
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


def _link(by_process: list[Measurements], memory_bandwidth: float, source: str) -> Link:
    timed = [measurements.message_seconds for measurements in by_process if measurements.message_seconds]
    if not timed:
        note = "guess: one device, so no link to measure; half of its measured memory bandwidth"
        sources = {"latency_s": note, "bandwidth": note}
        return Link(latency_s=0.0, bandwidth=memory_bandwidth / 2, sources=sources)
    fits = [linear_fit(*zip(*pairs[1:], strict=True)) for pairs in timed]
    rings = [measurements.ring_bandwidth for measurements in by_process if measurements.ring_bandwidth]
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


def source_text(device_type: str, processes: int, threads: int, first: int = 0) -> str:
    """Return the source of measured figures."""
    load = f"{processes} process{'es' if processes > 1 else ''} at once"
    if device_type == "cpu":
        load += f", {threads} thread{'s' if threads > 1 else ''} each"
    return (
        f"measured by stagewright probe on {date.today().isoformat()}, torch {torch.__version__}, "
        f"{processor_name(device_type, first)}, {load}"
    )


def processor_name(device_type: str, number: int = 0) -> str:
    """Return the name that the processor, or GPU `number`, reports."""
    if device_type != "cpu":
        return device_name(torch.device(device_type, number))
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cache_bytes() -> int | None:
    """Return the bytes of the last-level cache, or None where the system does not report them."""
    levels = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        return max((parse_bytes(f"{level.read_text().strip()}iB") for level in levels), default=None)
    except (OSError, InputError):
        return None
