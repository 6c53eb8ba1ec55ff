"""Devices and clusters as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stagewright.cluster import Cluster, Device
from stagewright.cluster.prices import list_prices
from stagewright.report.tables import Table, facts, table
from stagewright.units import GIB, GIGA, TERA, format_bytes, format_seconds


def device_table(devices: Mapping[str, Device]) -> Table:
    """Return the catalog: memory, bandwidth, dense peaks and price per device; blank if a device lacks the precision, or no
    on-demand price is known."""
    rows = [
        (
            name,
            device.vendor,
            f"{device.memory_bytes / GIB:.2f}",
            f"{device.usable_bytes / GIB:.2f}",
            f"{device.memory_bandwidth / GIGA:.0f}",
            _tera(device, "bf16") or _tera(device, "fp16"),
            _tera(device, "fp32"),
            f"{price.dollars:.2f}" if (price := list_prices(name).get("on-demand")) else "",
        )
        for name, device in devices.items()
    ]
    headings = (
        "device", "vendor", "memory\nGiB", "for plans\nGiB", "bandwidth\nGB/s", "16-bit\nTFLOP/s", "fp32\nTFLOP/s",
        "dollars\nan hour",
    )  # fmt: skip
    return table("", headings, rows, text=2)


def prices_line(devices: Iterable[str]) -> str:
    """Return the dates and sources of the prices."""
    dates = [price.date for name in devices for price in list_prices(name).values() if price.date]
    return (
        f"Dollars per device-hour: on-demand list prices of {min(dates)} to {max(dates)}; --json also has prices of "
        "reserved and spot devices, each with seller and date."
    )


def _tera(device: Device, precision: str) -> str:
    peak = device.peak_flops.get(precision)
    return "" if peak is None else f"{peak / TERA:.4g}"


_SLOW = 0.5
_SHOWN = 10


def links_summary(cluster: Cluster) -> Table:
    """Return the measured links between ranks: the median inside and between nodes, and links slower than half of it, the
    slowest first."""
    spans = {"inside a node": _links(cluster, inside=True), "between nodes": _links(cluster, inside=False)}
    rows = []
    for span, links in spans.items():
        if not links:
            continue
        median = links[len(links) // 2][0]
        latency = sorted(latency for _, latency, _, _ in links)[len(links) // 2]
        rows.append((span, "median", _rate(median), format_seconds(latency), ""))
        slow = [link for link in links if link[0] < _SLOW * median]
        for bandwidth, latency, a, b in slow[:_SHOWN]:
            path = f"rank {a} to rank {b}"
            rows.append(
                (span, path, _rate(bandwidth), format_seconds(latency), f"slow: {bandwidth / median:.2f}x")
            )
        if len(slow) > _SHOWN:
            rows.append((span, f"{len(slow) - _SHOWN} more slow links", "", "", ""))
    return table("", ("links", "from, to", "bandwidth", "latency", ""), rows, text=2)


def _links(cluster: Cluster, inside: bool) -> list[tuple[float, float, int, int]]:
    """Return bandwidth, latency, sender and receiver of every pair, the slowest first."""
    ranks = range(cluster.num_devices)
    links = [
        (link.bandwidth, link.latency_s, a, b)
        for a in ranks
        for b in ranks
        if a != b and (cluster.node_of(a) == cluster.node_of(b)) is inside
        for link in (cluster.link_between(a, b),)
    ]
    return sorted(links)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / GIGA:.3g} GB/s"


def cluster_summary(cluster: Cluster) -> Table:
    """Return the results of a probe: one line per figure of the first node's device and links."""
    node = cluster.nodes[0]
    device, link = node.device, node.intra_node if node.devices_per_node > 1 else node.inter_node
    rates = ", ".join(
        f"{name} {peak * (device.matmul_efficiency.get(name) or 1) / GIGA:.4g} GFLOP/s"
        for name in device.peak_flops.available()
        if (peak := device.peak_flops.get(name)) is not None
    )
    return facts(
        [
            ("devices", f"{cluster.num_devices} x {device.kind} ({device.vendor})"),
            ("memory each", format_bytes(device.memory_bytes)),
            ("matrix multiply", rates),
            ("memory bandwidth", f"{device.memory_bandwidth * device.memory_efficiency / GIGA:.3g} GB/s"),
            ("operator overhead", format_seconds(device.host_overhead_s)),
            (
                "between processes",
                f"{link.bandwidth / GIGA:.3g} GB/s, latency {format_seconds(link.latency_s)}",
            ),
        ]
    )
