"""Judge the rate of large square matmuls: the best of five sizes that users of a card measured, in each precision.

`torch.matmul` of 1,024 to 10,240 rows, columns and inner elements on one GPU, timed over 30 runs. Every second row of the
devices in `FITTED` decided figures of the catalog; no other row did.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from verdict import Row, arguments, document, show

from stagewright.cluster import Device, load_cluster
from stagewright.cluster.matmul import MatmulShape

DATA = Path(__file__).parent / "data" / "kernels"
BAR = 0.10
SIZES = (1024, 2048, 4096, 8192, 10240)
FITTED = ("jetson-thor", "rtx-pro-6000", "rtx3090", "rtx4090", "rtx5090", "rx7900xtx")
"""Devices whose first, third, ... rows are fitted; their figures stand for others of the same generation."""

_DISTURBED = 0.7
"""A row is left out if one 16-bit type attains less than this fraction of the other, at equal peaks."""


def best_rate(device: Device, precision: str) -> float:
    """Return the FLOP/s of the best size."""
    item = 2 if precision in ("bf16", "fp16") else 4
    seconds = {
        size: device.shaped_matmul_seconds(
            [MatmulShape(1, size, size, size)], precision, 3.0 * item * size**2, alone=True
        )
        for size in SIZES
    }
    return max(2 * size**3 / (device.launch_overhead_s + taken) for size, taken in seconds.items())


def judged(folder: Path = DATA, left_out: Counter[str] | None = None) -> Iterator[Row]:
    """Yield a row per device, precision and submission; disturbed ones are counted in `left_out`."""
    numbers: Counter[str] = Counter()
    with (folder / "square_matmuls.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            name = record["device"]
            device = load_cluster(f"1x-{name}").device
            numbers[name] += 1
            half = "fit" if name in FITTED and numbers[name] % 2 else "other"
            rates = {
                precision: float(record[f"{precision}_tflops"]) * 1e12
                for precision in ("fp32", "tf32", "fp16", "bf16")
                if record[f"{precision}_tflops"] and device.peak_flops.get(precision)
            }
            if min(rates["fp16"], rates.get("bf16", rates["fp16"])) < _DISTURBED * max(
                rates["fp16"], rates.get("bf16", 0.0)
            ):
                if left_out is not None:
                    left_out[f"{name}: one 16-bit type is far slower than the other"] += 1
                continue
            for precision, measured in rates.items():
                label = f"{name} {precision} row {numbers[name]}"
                yield Row(label, name, best_rate(device, precision), measured, half)


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every rate, not only the groups")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(judged(options.data, left_out))
    if options.json:
        print(json.dumps(document(rows, BAR) | {"left_out": left_out}, indent=1))
        return
    show(rows, BAR, "FLOP/s", as_json=False, every_row=options.every_row)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")


if __name__ == "__main__":
    main()
