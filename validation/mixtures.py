"""Predicted beside published seconds per step of a mixture under Megatron-Core: the rows that one constant is fitted on.

The rows of `validation/throughput.py` are not used for it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from footprints import with_lighter_ends
from megatron_bridge import DESCRIBED, FUSED_ATTENTION
from throughput import DATA, MODERN, nodes_of_eight
from verdict import Row, arguments, show

from stagewright.estimation.megatron import Layout, find_megatron_stack
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run

BAR = 0.1


def rows(folder: Path = DATA) -> Iterator[Row]:
    """Seconds per step; experts' devices are those of all widths but the pipeline's."""
    with (folder / "megatron_moe_zoo.csv").open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            seconds = run_of(record).step().seconds
            label = f"tp {record['tp']} pp {record['pp']} ep {record['ep']} {record['dispatcher']}"
            label += ", beside another microbatch" * (record["overlap"] == "1")
            yield Row(label, record["model"], seconds, float(record["step_s"]), "fit")


def run_of(record: dict[str, str]) -> Run:
    """The run of a row, with the attention of Transformer Engine and collectives of products hidden."""
    num, batch, tokens, tp, pp, chunks, ep = (
        int(record[key]) for key in ("n_gpus", "global_batch", "seq_len", "tp", "pp", "vp", "ep")
    )
    shape, dp = DESCRIBED[record["model"]], num // (tp * pp)
    layout = Layout(
        tokens, tp=tp, pp=pp, dp=dp, ep=ep // tp, num_microbatches=batch // dp, num_chunks=chunks,
        schedule="interleaved-1f1b", sequence_parallel=True, shards_optimizer=True, overlaps_reduction=True,
        layers_per_stage=with_lighter_ends(shape.num_layers, pp * chunks),
    )  # fmt: skip
    fusion = replace(
        find_fusion(MODERN), hidden_gathers="all", hides_dispatch=record["overlap"] == "1",
        dispatch="once per node" if record["dispatcher"] == "DeepEP" else "every copy",
    )  # fmt: skip
    cluster = nodes_of_eight("h100", num, FUSED_ATTENTION["h100"])
    return Run(shape, layout, find_megatron_stack(MODERN), fusion, cluster)


def main() -> None:
    """Print the verdict and the constant."""
    given = arguments(__doc__, DATA).parse_args()
    show(list(rows(given.data)), BAR, "s", given.json)
    if not given.json:
        print(f"routing_wait_s = {find_fusion(MODERN).routing_wait_s:g}")


if __name__ == "__main__":
    main()
