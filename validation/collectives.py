"""Judge collectives by their size, inside a node and over several of them, against NCCL's own benchmark."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from verdict import Row, arguments, document, half_of, show

from stagewright.cluster import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    load_cluster,
    reduce_scatter_seconds,
    ring_shift_seconds,
)
from stagewright.errors import InputError

DATA = Path(__file__).parent / "data" / "kernels"
LARGE_BYTES = 2**20
BARS = {"1 MiB and more": 0.10, "less": 0.15}
BAR_OF_NODES, MESSAGES = 0.15, "messages around a ring"
_NAMES = {"a100": "a100-80"}
_SECONDS = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "alltoall": all_to_all_seconds,
}
_ASKED = {**_SECONDS, "sendrecv": ring_shift_seconds}
_DEVICES = {"A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200", "B300": "b300", "GB200": "gb200",
            "GB300": "gb300", "MI300X": "mi300x"}  # fmt: skip
"""How names of GPUs begin, and what the catalog calls them."""

_RACK = 16
"""Hosts of four devices whose links are those of one node in the catalog."""


def judged(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """A row per measurement inside a node; those of devices or nodes that the catalog lacks are counted in `left_out`."""
    with (folder / "nccl_single_node_by_size.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            system, op = record["system"].partition("_")[0], record["op"]
            device, count = _NAMES.get(system, system), int(record["n_gpus"])
            try:
                cluster = load_cluster(f"{count}x-{device}")
            except InputError as error:
                reason = str(error).partition(";")[0]
                cluster = None
            else:
                reason = f"a node of the catalog has fewer than {count} {device}"
            if cluster is None or cluster.node_of(count - 1) > 0 or op not in _SECONDS:
                if left_out is not None:
                    left_out[reason] += 1
                continue
            size = int(record["size_bytes_nccl_tests"])
            measured = float(record["time_us_out_of_place"]) * 1e-6
            group = next(iter(BARS)) if size >= LARGE_BYTES else "less"
            label = f"{count} x {device} {op} {size} bytes, NCCL {record['data_set_version']}"
            yield Row(label, group, _SECONDS[op](cluster, size, range(count)), measured)


def judged_over_nodes(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """A row per measurement of clusters, by device, operation and nodes; those that cannot be asked for are counted."""
    with (folder / "nccl_multi_node_by_size.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            ask, size = _ASKED.get(record["op"]), int(record["size_bytes"])
            device = _DEVICES.get(record["gpu"].partition("-")[0].partition(" ")[0])
            microseconds = record["time_us_out_of_place"] or record["time_us_in_place"]
            if ask is None or device is None or not microseconds:
                if left_out is not None:
                    left_out[_reason(record)] += 1
                continue
            nodes, per_node = int(record["nodes"]), int(record["gpus_per_node"])
            cluster = load_cluster(_name(device, nodes, per_node))
            seconds = ask(cluster, size, range(nodes * per_node))
            shape = f"{nodes} x {per_node} x {device} {record['op']} {size} bytes"
            kind = MESSAGES if record["op"] == "sendrecv" else record["op"]
            group = f"{device}: {kind}, {'one node' if cluster.num_nodes == 1 else 'several nodes'}"
            yield Row(shape, group, seconds, float(microseconds) * 1e-6, half_of(shape))


def _reason(record: dict[str, str]) -> str:
    if record["op"] not in _ASKED:
        return f"no such collective here: {record['op']}"
    return f"the catalog has no {record['gpu']}"


def _name(device: str, nodes: int, per_node: int) -> str:
    """What a user calls such a cluster; racks whose devices are joined like those of one host are nodes."""
    if device in ("gb200", "gb300") and per_node == 4 and nodes > 1:
        racks = -(-nodes // _RACK)
        return f"{racks}x{nodes * per_node // racks}x-{device}"
    return f"{nodes}x{per_node}x-{device}"


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every measurement")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(judged(options.data, left_out))
    parts = {group: [row for row in rows if row.group == group] for group in BARS}
    over = list(judged_over_nodes(options.data, left_out))
    parts["over nodes"] = [row for row in over if MESSAGES not in row.group]
    parts[MESSAGES] = [row for row in over if MESSAGES in row.group]
    bars = BARS | {"over nodes": BAR_OF_NODES, MESSAGES: BAR_OF_NODES}
    if options.json:
        found = {group: document(part, bars[group]) for group, part in parts.items() if part}
        print(json.dumps(found | {"left_out": left_out}, indent=1))
        return
    for group, part in parts.items():
        if part:
            show(part, bars[group], "s", False, options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
