"""Judge step times of Megatron-LM's runs on 2 to 512 A100: one device profile, constants of the runtime fitted on a part."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

from verdict import Row, arguments, show

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run

BARS = {
    "megatron_a100_single_node.csv": 0.06,
    "megatron_a100_multi_node.csv": 0.08,
    "megatron_selene_a100.csv": 0.035,
}
DATA = Path(__file__).parent / "data" / "megatron_time"
VOCABULARY = 51_200
STEPS = {"megatron_a100_single_node.csv": 6, "megatron_a100_multi_node.csv": 2, "megatron_selene_a100.csv": 2}
"""Every so many rows were used to fit constants."""

Record = dict[str, str]


@cache
def cluster(num_devices: int) -> Cluster:
    """A100-80 in nodes of eight."""
    whole = num_devices % 8 == 0 and num_devices > 8
    return load_cluster(f"{num_devices // 8}x8x-a100-80" if whole else f"{num_devices}x-a100-80")


def vtrain(record: Record) -> tuple[Run, float]:
    """A run published with vTrain, and its seconds.

    Runs in one node do not recompute: twice the hidden size adds 0.96 ms per layer and sample at width 1, where the products
    alone would need 360 TFLOP/s if they ran four times.
    """
    given = {key: int(record[key]) for key in record if key not in ("iteration_ms", "params_billion")}
    shape = Shape.gpt(given["layers"], given["hidden"], given["heads"], VOCABULARY, given["seq_len"])
    samples = given["dp"] * given["micro_batch"]
    layout = Layout(
        given["seq_len"],
        tp=given["tp"],
        pp=given["pp"],
        dp=given["dp"],
        microbatch_size=given["micro_batch"],
        num_microbatches=given["global_batch"] // samples,
        recompute="full" if given["num_gpus"] > 8 else "none",
    )
    return _run(shape, layout, "megatron-deepspeed", given["num_gpus"]), float(record["iteration_ms"]) / 1e3


def selene(record: Record) -> tuple[Run, float]:
    """A run of Korthikanti et al., and its seconds."""
    given = {key: int(record[key]) for key in ("layers", "hidden", "heads", "seq_len", "num_gpus", "chunks")}
    size = int(record["micro_batch"])
    splits = record["recompute"] == "seqsel"
    shape = Shape.gpt(given["layers"], given["hidden"], given["heads"], VOCABULARY, given["seq_len"])
    layout = Layout(
        given["seq_len"],
        tp=int(record["tp"]),
        pp=int(record["pp"]),
        dp=int(record["dp"]),
        microbatch_size=size,
        num_microbatches=int(record["global_batch"]) // (int(record["dp"]) * size),
        recompute="selective" if splits else "full",
        sequence_parallel=splits,
        schedule="interleaved-1f1b" if given["chunks"] > 1 else "1f1b",
        num_chunks=given["chunks"],
    )
    return _run(shape, layout, "megatron-lm", given["num_gpus"]), float(record["iteration_s"])


def _run(shape: Shape, layout: Layout, fusion: str, num_devices: int) -> Run:
    stack = find_megatron_stack("megatron-deepspeed")
    return Run(shape, layout, stack, find_fusion(fusion), cluster(num_devices))


_READERS: dict[str, Callable[[Record], tuple[Run, float]]] = {
    "megatron_a100_single_node.csv": vtrain,
    "megatron_a100_multi_node.csv": vtrain,
    "megatron_selene_a100.csv": selene,
}


def rows(name: str, folder: Path = DATA, every: int = 1) -> Iterator[Row]:
    """Seconds of a step of every run (or of every so many) of a table."""
    with (folder / name).open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    for index, record in enumerate(records):
        if index % every:
            continue
        run, measured = _READERS[name](record)
        layout, shape = run.layout, run.shape
        label = (
            f"h={shape.hidden} L={shape.num_layers} tp={layout.tp} pp={layout.pp} dp={layout.dp} "
            f"b={layout.microbatch_size} m={layout.num_microbatches} {layout.recompute}"
        )
        half = "fit" if index % STEPS[name] == 0 else "held"
        yield Row(label, name, run.step().seconds, measured, half)


def main() -> None:
    """Print the verdict of every table that is there, then the constants."""
    given = arguments(__doc__, DATA).parse_args()
    for name, bar in BARS.items():
        if (given.data / name).exists():
            found = list(rows(name, given.data))
            show(found, bar, "s", given.json, every_row=len(found) < 100)
            print() if not given.json else None
    if not given.json:
        for fusion in ("megatron-deepspeed", "megatron-lm"):
            print(asdict(find_fusion(fusion)))


if __name__ == "__main__":
    main()
