"""Judge exchanges of tokens with experts of other ranks, against DeepEP's own times by tokens.

Its normal kernels on nodes of eight GPUs: dispatch in fp8 with a scale for 128 elements, combine in bf16, each with the
exchange of how many tokens come. Experts are taken to be equally likely.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from verdict import Row, arguments, document, half_of, show

from stagewright.cluster import dispatch_seconds, load_cluster
from stagewright.estimation.collectives import met

DATA = Path(__file__).parent / "data" / "kernels"
BAR = 0.15
PER_NODE = 8
_DEVICES = {
    "h100": "h100",
    "b200": "b200",
    "h200": "h200",
    "gb200": "gb200",
    "b300": "b300",
    "gb300": "gb300",
}
_TOKEN_BYTES = {"dispatch": 1 + 4 / 128, "combine": 2.0}
"""Of an element."""


def judged(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """A row per dispatch and combine; those that cannot be asked for are counted in `left_out`."""
    counted = Counter[str]() if left_out is None else left_out
    with (folder / "deepep_normal_by_tokens.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            device = _DEVICES.get(record["system"].partition("_")[0])
            if device is None:
                counted[f"the catalog has no {record['system']}"] += 2
                continue
            for kind in _TOKEN_BYTES:
                yield _row(record, device, kind)
    with (folder / "deepep_readme_bandwidth.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            counted[_why_not(record)] += 1


def _row(record: dict[str, str], device: str, kind: str) -> Row:
    names = ("nodes", "tokens_per_rank", "hidden", "topk", f"{kind}_sms")
    nodes, num_tokens, hidden, copies, processors = (int(record[name]) for name in names)
    cluster = load_cluster(f"{nodes}x{PER_NODE}x-{device}")
    ranks = range(cluster.num_devices)
    tokens = met(cluster, ranks, num_tokens, hidden * _TOKEN_BYTES[kind], copies)
    predicted = dispatch_seconds(
        cluster, tokens, ranks, sums=kind == "combine", num_multiprocessors=processors
    )
    measured = (float(record[f"{kind}_us"]) + float(record[f"{kind}_notify_us"])) * 1e-6
    shape = f"{nodes} x {PER_NODE} x {device} {num_tokens} x {hidden} to {copies} of {record['experts']}"
    shape += f", {processors} multiprocessors, {kind}"
    return Row(shape, f"{device}: {kind}, {nodes} nodes", predicted, measured, half_of(shape))


def _why_not(record: dict[str, str]) -> str:
    """Why a row of the project's own page is not judged."""
    if record["kernel"] != "normal":
        return f"no such kernels here: {record['kernel']}"
    if record["gpu"].startswith("H800"):
        return "the catalog has no H800, and tokens go to a limited number of nodes"
    return f"it does not say on which GPU, or of which size: {record['gpu']}"


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every measurement")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(judged(options.data, left_out))
    if options.json:
        print(json.dumps({"tokens": document(rows, BAR), "left_out": left_out}, indent=1))
        return
    show(rows, BAR, "s", False, options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
