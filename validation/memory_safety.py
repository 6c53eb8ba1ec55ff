"""Whether anything that was measured above a device's memory, or did not run, would have been recommended.

Every measured run is offered a device just large enough by our prediction, as a search takes it: reserved bytes, with the
job's reserve. It is unsafe where the measured peak is above that device.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import footprints
import megatron_core
import sailor
from verdict import Row, arguments, show

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron import footprints as ranks_of
from stagewright.estimation.megatron.reserve import reserved_bytes
from stagewright.planning.job import Job

MIB = 2**20


def held_back(device: str) -> float:
    """Share of a device's memory that recommendations leave free."""
    found = load_cluster(f"8x-{device}").device
    return 1 - Job(global_batch=1, sequence_length=1).usable_bytes(found) / found.memory_bytes


def rows(folder: Path = footprints.DATA) -> Iterator[Row]:
    """Bytes of the smallest device a run would be recommended for, beside what it was measured to reserve."""
    with (folder / "megatron_core_b200.csv").open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            run = megatron_core.run_of(record)
            ranks = ranks_of(run.shape, run.layout, run.stack)
            peak = max(reserved_bytes(rank, run.shape, run.layout, run.stack) for rank in ranks)
            label = f"{record['model']} tp={record['tp']} ep={record['ep']} pp={record['pp']} m={record['microbatches']}"
            yield Row(label, "B200", peak / (1 - held_back("b200")), float(record["max_reserved_mib"]) * MIB)
    for row in sailor.rows("memory"):
        yield Row(row.label, "GH200", row.predicted / (1 - held_back("gh200")), row.measured)
    records = list(csv.DictReader((folder / "zero_bubble_measured.csv").open(newline="", encoding="utf-8")))
    handmade = [record for record in records if record["schedule"] in ("1F1B", "1F1B-I", "ZB-V")]
    for row in footprints.zero_bubble(handmade):
        yield Row(row.label, "A100", row.predicted * 1e9 / (1 - held_back("a100-80")), row.measured * 1e9)


def unsafe(found: list[Row]) -> list[str]:
    """Runs that would have been recommended for a device they do not fit."""
    return [row.label for row in found if row.measured > row.predicted]


def main() -> None:
    """Print the verdict."""
    given = arguments(__doc__, footprints.DATA).parse_args()
    found = list(rows(given.data))
    show(found, 1.0, "bytes", given.json)
    if not given.json:
        wrong = unsafe(found)
        print(f"unsafe: {len(wrong)} of {len(found)}: {wrong or 'none'}")


if __name__ == "__main__":
    main()
