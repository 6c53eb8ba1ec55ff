"""Judge the time of matrix products by their shapes, measured alone with a warm cache of kernels on one GPU.

`torch.nn.Linear` without bias in bf16, replayed from a CUDA graph: what the product's cost functions say of ``mm``, with the
clocks of a GPU that does nothing else. Constants were fitted on 900 of the 2,714 shapes of every device, drawn at random.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from fragment import Fragment
from verdict import Row, arguments, show

from stagewright.cluster import load_cluster

DATA = Path(__file__).parent / "data" / "kernels"
BAR, LARGE_BAR = 0.07, 0.045
LARGE_FLOP = 20e9
CATALOG = {
    "a100_sxm": "a100-80", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200",
    "gb200_sxm": "gb200",
}  # fmt: skip
"""Systems of the tables and what the catalog calls their devices."""


def judged(folder: Path = DATA) -> Iterator[Row]:
    """A row per product."""
    devices = {name: load_cluster(f"1x-{device}").device for name, device in CATALOG.items()}
    with (folder / "gemm_bf16_by_shape.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            rows, columns, inner = (int(record[key]) for key in ("m", "n", "k"))
            asked, system = Fragment("bfloat16"), record["system"]
            asked.call(
                "mm", asked.tensor(rows, inner), asked.tensor(inner, columns), makes=((rows, columns),)
            )
            size = "large" if 2 * rows * columns * inner >= LARGE_FLOP else "small"
            label = f"{CATALOG[system]} {rows} x {columns} x {inner}"
            predicted, measured = asked.seconds_alone(devices[system]), float(record["latency_us"]) * 1e-6
            yield Row(label, f"{CATALOG[system]}: {size}", predicted, measured)


def main() -> None:
    parser = arguments(__doc__, DATA)
    parser.add_argument("--every-row", action="store_true", help="print every product, not only the groups")
    options = parser.parse_args()
    rows = list(judged(options.data))
    show(rows, BAR, "s", options.json, options.every_row)
    if not options.json:
        large = [row for row in rows if row.group.endswith("large")]
        print(f"of {LARGE_FLOP / 1e9:.0f} GFLOP or more:")
        show(large, LARGE_BAR, "s", as_json=False, every_row=False)


if __name__ == "__main__":
    main()
