"""Judge how well predicted step times order AMP's trials: GPT-2 on 16 equal or mixed GPUs of a cloud."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path

from amp import DATA, GLOBAL_BATCH, HIDDEN, SEQUENCE, VOCABULARY, spearman, widths_of
from verdict import Row, arguments, summary

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import resolve

BARS = {"amp_homogeneous.csv": 0.96, "amp_het_cluster.csv": 0.85}
PICKED = 0.02
MODEL = {"n_layer": 24, "n_embd": HIDDEN, "n_head": 16, "vocab_size": VOCABULARY}
RUNTIMES = {
    "amp_homogeneous.csv": str(DATA / "deepspeed-in-a-cloud.toml"),
    "amp_het_cluster.csv": str(DATA / "deepspeed-in-a-cloud-on-p3.toml"),
}
ATTAINED, SOCKETS = 0.6, 21e9 / 8
"""Of a cloud instance's network, and bytes/s of one instance's sockets whatever its network, by all its devices together;
fitted on every other trial."""
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


def asked(record: Record, name: str) -> Plan:
    """The configuration of a trial; of its 30 layers, 2 to 25 are blocks."""
    widths = widths_of(record)
    counts = tuple(sum(2 <= layer < 26 for layer in range(a, b)) for a, b in pairwise(widths.boundaries))
    job = Job(global_batch=GLOBAL_BATCH, sequence_length=SEQUENCE, dtype="fp16", runtime=RUNTIMES[name])
    return estimate(
        resolve("gpt2", MODEL), cluster(name), job, tp=widths.tp, pp=widths.pp, dp=widths.dp,
        microbatch=widths.microbatch_size, layers_per_stage=counts if widths.pp > 1 else None,
    )  # fmt: skip


def rows(name: str, folder: Path = DATA) -> Iterator[Row]:
    """Seconds of every trial that ran to the end."""
    with (folder / name).open(newline="", encoding="utf-8") as file:
        records = [row for row in csv.DictReader(file) if math.isfinite(float(row["measured_s"]))]
    for record in records:
        plan = asked(record, name)
        label = f"b={plan.microbatch_size} tp={plan.tp} dp={plan.dp} pp={plan.pp}"
        yield Row(label, name, plan.predictions.step_seconds, float(record["measured_s"]))


def verdict(found: list[Row]) -> dict[str, float]:
    """Rank correlation, and how much slower the one picked is than the best."""
    picked = min(found, key=lambda row: row.predicted)
    best = min(found, key=lambda row: row.measured)
    order = spearman([row.predicted for row in found], [row.measured for row in found])
    return {"spearman": order, "picked_over_best": picked.measured / best.measured - 1}


def main() -> None:
    """Print every trial and the two verdicts."""
    given = arguments(__doc__, DATA).parse_args()
    missed = False
    for name, bar in BARS.items():
        if not (given.data / name).exists():
            continue
        found = list(rows(name, given.data))
        made = verdict(found)
        missed |= made["spearman"] < bar or made["picked_over_best"] > PICKED
        if given.json:
            json.dump({"name": name, "rows": [asdict(row) for row in found], "bar": bar, **made}, sys.stdout)
            print()
            continue
        for row in found:
            print(f"{row.label:<32} {row.predicted:8.3f} {row.measured:8.3f} s {row.error:+8.2%}")
        print(summary(name, found))
        print(f"{name}: Spearman {made['spearman']:.3f} (bar {bar}), picked +{made['picked_over_best']:.1%}")
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
