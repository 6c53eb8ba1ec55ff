"""Judge step times and reserved memory of Megatron-Core on 8 B200."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from footprints import B200_MODELS, DATA, b200_layout
from verdict import Row, arguments, show

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron import find_megatron_stack, footprints
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.estimation.megatron.reserve import reserved_bytes
from stagewright.planning.configure.iteration import Run

BARS = {"time": 0.05, "reserved": 0.03}
STACK = "megatron-core+te"
MIB = 2**20

Record = dict[str, str]


def run_of(record: Record) -> Run:
    """The configuration of a row; models have fewer layers than their originals.

    Inputs of experts are padded to a fixed capacity (`set_megatron_config` of SimuMax's examples), so that no host has to
    know how many tokens came.
    """
    shape = replace(B200_MODELS[record["model"]], num_layers=int(record["layers"]))
    cluster = load_cluster("8x-b200")
    fusion = replace(find_fusion(STACK), routing_wait_s=0.0)
    return Run(shape, b200_layout(record), find_megatron_stack(STACK), fusion, cluster)


def rows(what: str, folder: Path = DATA) -> Iterator[Row]:
    """Seconds of a step, or MiB reserved on the fullest rank."""
    with (folder / "megatron_core_b200.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    for index, record in enumerate(records):
        run = run_of(record)
        widths = " ".join(f"{key}={record[key]}" for key in ("tp", "cp", "ep", "pp", "dp", "microbatches"))
        label, half = f"{record['model']} {widths}", "fit" if index % 2 == 0 else "held"
        if what == "time":
            yield Row(label, what, run.step().seconds, float(record["iteration_ms"]) / 1e3, half)
        else:
            ranks = footprints(run.shape, run.layout, run.stack)
            peak = max(reserved_bytes(rank, run.shape, run.layout, run.stack) for rank in ranks)
            yield Row(label, what, peak / MIB, float(record["max_reserved_mib"]), half)


def main() -> None:
    """Print both verdicts and the constants of the runtime."""
    given = arguments(__doc__, DATA).parse_args()
    show(list(rows("time", given.data)), BARS["time"], "s", given.json)
    show(list(rows("reserved", given.data)), BARS["reserved"], "MiB", given.json)
    if not given.json:
        print(asdict(find_fusion(STACK)))


if __name__ == "__main__":
    main()
