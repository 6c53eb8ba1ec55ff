"""Judge collectives inside a node by their size, against NCCL's own benchmark."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from verdict import Row, arguments, document, show

from stagewright.cluster import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    load_cluster,
    reduce_scatter_seconds,
)
from stagewright.errors import InputError

DATA = Path(__file__).parent / "data" / "kernels"
LARGE_BYTES = 2**20
BARS = {"1 MiB and more": 0.10, "less": 0.15}
_NAMES = {"a100": "a100-80"}
_SECONDS = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "alltoall": all_to_all_seconds,
}


def judged(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """A row per measurement; those of devices or nodes that the catalog does not have are counted in `left_out`."""
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


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every measurement")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(judged(options.data, left_out))
    parts = {group: [row for row in rows if row.group == group] for group in BARS}
    if options.json:
        found = {group: document(part, BARS[group]) for group, part in parts.items() if part}
        print(json.dumps(found | {"left_out": left_out}, indent=1))
        return
    for group, part in parts.items():
        if part:
            show(part, BARS[group], "s", False, options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
