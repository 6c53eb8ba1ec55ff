"""Devices and clusters as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, takewhile
from typing import Any

from stagewright.cluster import Cluster, Device, NodeGroup
from stagewright.cluster.prices import list_prices
from stagewright.cluster.schema import SourcedModel
from stagewright.report.tables import Table, facts, table
from stagewright.text import plural
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


def cluster_tables(cluster: Cluster) -> list[Table | str]:
    """Return every figure of a cluster with its source: of its nodes, links and hosts, and of devices with their prices."""
    nodes = plural(cluster.num_nodes, "node")
    shown: list[Table | str] = [f"{cluster.name}: {plural(cluster.num_devices, 'device')} on {nodes}"]
    figures = list(_figures(cluster))
    for title, run in groupby(figures, key=lambda figure: figure.part):
        rows, last = [], ""
        for figure in run:
            rows.append((figure.name, figure.value, "as above" if figure.source == last else figure.source))
            last = figure.source
        shown.append(table(title, ("figure", "value", "source"), rows, text=3))
    if any(group.host is None for group in cluster.nodes):
        shown.append("No host is described: no optimizer state is kept there.")
    guesses = sum(figure.is_guess for figure in figures)
    shown.append(
        f"{guesses} of these {len(figures)} figures are guesses, or partly so: their sources say it."
    )
    return shown


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as a JSON document: its description with `sources`, the keys of guesses, and prices by device."""
    return {
        **cluster.model_dump(mode="json", exclude_none=True),
        "num_devices": cluster.num_devices,
        "num_nodes": cluster.num_nodes,
        "guesses": [figure.key for figure in _figures(cluster) if figure.is_guess],
        "prices": {
            group.device.name: {terms: vars(price) for terms, price in list_prices(group.device.name).items()}
            for group in cluster.nodes
        },
    }


@dataclass(frozen=True)
class _Figure:
    part: str
    key: str
    """Where it is in the description: ``nodes[0].device.memory_bytes``."""
    name: str
    value: str
    source: str

    @property
    def is_guess(self) -> bool:
        return "guess" in self.source


def _figures(cluster: Cluster) -> Iterator[_Figure]:
    """Yield the figures of a cluster; parts that equal those of an earlier group of nodes once."""
    seen: list[SourcedModel] = []
    for number, group in enumerate(cluster.nodes):
        others = list(takewhile(lambda after: after.same_node, cluster.nodes[number + 1 :]))
        for place, title, part in _parts(group, others):
            if part in seen:
                continue
            seen.append(part)
            at = f"nodes[{number}].{place}".rstrip(".")
            for name in part.figures():
                value = reduce(getattr, name.split("."), part)
                is_shared = group.same_node and name == "num_nics"
                if isinstance(value, bool | int | float | str) and not is_shared:
                    is_of_kind = name == "devices_per_node" and (group.same_node or others)
                    label = f"{group.device.name} per node" if is_of_kind else name
                    source = part.source_of(name) or ""
                    yield _Figure(title, f"{at}.{name}", label, _shown(name, value), source)
            if part is group.device:
                for terms, price in list_prices(group.device.name).items():
                    source = f"{price.source}, {price.date}"
                    yield _Figure(title, "", f"price {terms}", f"{price.dollars:.2f} $/h", source)


def _parts(group: NodeGroup, others: Sequence[NodeGroup]) -> Iterator[tuple[str, str, SourcedModel]]:
    """Yield place, title and figures of the parts of a group of nodes, which also have the devices of `others`."""
    name = group.device.name
    kinds = " and ".join(f"{kind.devices_per_node} {kind.device.name}" for kind in (group, *others))
    nodes = (
        f"In the same node: {group.devices_per_node} {name}"
        if group.same_node
        else f"{plural(group.count, 'node')} of {kinds}"
    )
    yield "", nodes, group
    yield "intra_node", f"Links between {name} of a node, per device", group.intra_node
    yield "inter_node", f"Network of nodes with {name}, per adapter", group.inter_node
    if group.host is not None:
        yield "host", f"Host of nodes with {name}: {group.host.name}", group.host
    yield "device", f"Device {name}", group.device


def _shown(name: str, value: bool | float | str) -> str:
    """
    >>> _shown("peak_flops.bf16", 989.4e12), _shown("latency_s", 6e-6), _shown("count", 8), _shown("shares", True)
    ('989.4 TFLOP/s', '6.0 us', '8', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.startswith("peak_flops."):
        return f"{value / TERA:.4g} TFLOP/s"
    if name.endswith("bandwidth"):
        return f"{value / GIGA:,.4g} GB/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else f"{value:.4g}"


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
