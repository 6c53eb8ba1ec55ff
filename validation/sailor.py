"""Judge step times and memory of the runs published with Sailor: DeepSpeed's pipeline in TF32 on up to 128 GH200."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

from verdict import Row, arguments, show

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack, footprints
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run

BARS = {"time": 0.07, "memory": 0.05}
STACK = "deepspeed-tf32"
DATA = Path(__file__).parent / "data" / "sailor"
TABLE = "sailor_measured.csv"
SEQUENCE = 2048
SHAPES = {
    "OPT-350": Shape.gpt(24, 1024, 16, 50_272, SEQUENCE, drops=False),
    "GPT-NEO": Shape.gpt(32, 2560, 20, 50_257, SEQUENCE, drops=False),
}
CONTEXT_BYTES = 2.7e9
"""What the driver and the communication library hold, which the published peaks include; fitted on all runs."""

Record = dict[str, str]


@cache
def cluster(num_nodes: int) -> Cluster:
    """Nodes of four GH200."""
    return load_cluster("4x-gh200" if num_nodes == 1 else f"{num_nodes}x4x-gh200")


def run_of(record: Record) -> Run:
    """The configuration of a row; its stages list embedding and head as layers of their own."""
    shape, pp = SHAPES[record["model"]], int(record["num_stages"])
    (tp,) = {width for stage in json.loads(record["tp_per_stage_replica"]) for width in stage}
    (dp,) = set(json.loads(record["dp_per_stage"]))
    size = int(record["micro_batch"])
    ends = json.loads(record["stage_layers_first_last"])
    counts = [last - first + 1 for first, last in ends]
    counts[0] -= 1
    counts[-1] -= 1
    layout = Layout(
        SEQUENCE, tp=tp, pp=pp, dp=dp, microbatch_size=size,
        num_microbatches=int(record["global_batch"]) // (dp * size), layers_per_stage=tuple(counts),
    )  # fmt: skip
    stack = find_megatron_stack(STACK)
    return Run(shape, layout, stack, find_fusion(STACK), cluster(int(record["nodes"])))


def rows(what: str, folder: Path = DATA) -> Iterator[Row]:
    """Seconds of a step, or bytes of the fullest device; runs on equal devices only."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as file:
        records = [row for row in csv.DictReader(file) if row["site"] == "clariden"]
    for record in records:
        run = run_of(record)
        layout = run.layout
        label = (
            f"{record['model']} tp={layout.tp} pp={layout.pp} dp={layout.dp} b={layout.microbatch_size} "
            f"m={layout.num_microbatches}"
        )
        if what == "time":
            yield Row(label, f"{what} {record['model']}", run.step().seconds, float(record["iteration_s"]))
        else:
            ranks = footprints(run.shape, layout, run.stack)
            peak = max(rank.peak_bytes for rank in ranks) + CONTEXT_BYTES
            yield Row(label, f"{what} {record['model']}", peak, float(record["max_memory_bytes"]))


def main() -> None:
    """Print both verdicts and the constants of the runtime."""
    given = arguments(__doc__, DATA).parse_args()
    show(list(rows("time", given.data)), BARS["time"], "s", given.json)
    show(list(rows("memory", given.data)), BARS["memory"], "bytes", given.json)
    if not given.json:
        print(asdict(find_fusion(STACK)))


if __name__ == "__main__":
    main()
