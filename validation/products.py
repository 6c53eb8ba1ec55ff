"""Judge the time of matrix products by their shapes, measured alone with a warm cache of kernels on one GPU.

`torch.nn.Linear` without bias in bf16, replayed from a CUDA graph: what the product's cost functions say of ``mm``, with the
clocks of a GPU that does nothing else. Constants, and the tables of the kernels that libraries choose
(`validation/kernel_tables.py`), saw half of the 2,714 shapes of every device.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fragment import Fragment
from verdict import Row, arguments, document, half_of, show

from stagewright.cluster import load_cluster

DATA = Path(__file__).parent / "data" / "kernels"
BAR, LARGE_BAR = 0.07, 0.045
LARGE_FLOP = 20e9
CATALOG = {
    "a100": "a100-80", "h100": "h100", "h200": "h200", "gh200": "gh200", "b200": "b200", "b300": "b300", "gb200": "gb200",
    "gb300": "gb300", "l40s": "l40s",
}  # fmt: skip
"""Systems of the tables, without what follows an underscore, and what the catalog calls their devices."""


def judged(folder: Path = DATA, left_out: Counter[str] | None = None, kernels: bool = True) -> Iterator[Row]:
    """A row per product; those of systems that the catalog does not have are counted in `left_out`.

    Without `kernels` predictions are those of libraries that choose the fastest one.
    """
    devices = {system: load_cluster(f"1x-{name}").device for system, name in CATALOG.items()}
    if not kernels:
        devices = {system: device.with_best_kernels() for system, device in devices.items()}
    with (folder / "gemm_bf16_by_shape.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            device = devices.get(record["system"].partition("_")[0])
            if device is None:
                if left_out is not None:
                    left_out[record["system"]] += 1
                continue
            rows, columns, inner = (int(record[key]) for key in ("m", "n", "k"))
            asked = Fragment("bfloat16")
            asked.call(
                "mm", asked.tensor(rows, inner), asked.tensor(inner, columns), makes=((rows, columns),)
            )
            size = "large" if 2 * rows * columns * inner >= LARGE_FLOP else "small"
            label = f"{device.name} {rows} x {columns} x {inner}"
            measured = float(record["latency_us"]) * 1e-6
            yield Row(label, f"{device.name}: {size}", asked.seconds_alone(device), measured, half_of(label))


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every product, not only the groups")
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows = list(judged(options.data, left_out))
    large = [row for row in rows if row.group.endswith("large")]
    if options.json:
        found = {"all sizes": document(rows, BAR), "large": document(large, LARGE_BAR), "left_out": left_out}
        print(json.dumps(found, indent=1))
        return
    show(rows, BAR, "s", as_json=False, every_row=options.every_row)
    print(f"of {LARGE_FLOP / 1e9:.0f} GFLOP or more:")
    show(large, LARGE_BAR, "s", as_json=False, every_row=False)
    for system, count in left_out.items():
        print(f"{count} rows left out: the catalog has no {system}")


if __name__ == "__main__":
    main()
