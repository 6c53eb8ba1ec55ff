"""Judge AMP's formula on AMP's own predictions, and the order of its trials under AMP's formula and ours."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from verdict import Row, arguments, show

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from peers.widths import NodeRates, ProfiledLayers, Widths, amp_seconds

BAR = 1e-4
DATA = Path(__file__).parent / "data" / "amp"
GLOBAL_BATCH, SEQUENCE, HIDDEN, VOCABULARY = 32, 1024, 1024, 52256
_BIT = 1 / 8
G4DN = NodeRates(inter=50e9 * _BIT, intra=50e9 * _BIT, num_devices=4)
P3 = NodeRates(inter=10e9 * _BIT, intra=170e9 * _BIT, num_devices=4)
CLUSTERS = {
    "amp_homogeneous.csv": ((G4DN,) * 4, {"G4": 1.0}),
    "amp_het_cluster.csv": ((P3, P3, P3, G4DN), {"P3": 0.75, "G4": 0.25}),
}
"""Nodes of each experiment, and the share of their layer times in the profile."""
_KINDS = ("embed", "noop", *("block",) * 24, "noop", "noop", "head", "noop")

Record = dict[str, str]


def read(path: Path) -> list[Record]:
    """The rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def profile(shares: dict[str, float], folder: Path = DATA) -> ProfiledLayers:
    """The GPT-2 of the experiments; a backward is taken to be as long as two forwards."""
    seconds = {
        tp: sum(share * 3 * _forward(folder, node, tp) for node, share in shares.items()) for tp in (1, 2, 4)
    }
    blocks = np.array([kind == "block" for kind in _KINDS], float)
    edges = np.array([kind in ("embed", "head") for kind in _KINDS], float)
    elements = np.full(len(_KINDS), float(SEQUENCE * HIDDEN))
    return ProfiledLayers(
        {tp: np.asarray(found) for tp, found in seconds.items()},
        elements,
        parameters=12 * HIDDEN**2 * blocks,
        shared=HIDDEN * VOCABULARY * edges,
    )


def _forward(folder: Path, node: str, tp: int) -> np.ndarray:
    rows = read(folder / f"amp_layer_seconds_gpt2_{node}_{tp}.csv")
    return np.array([float(row["forward_seconds_per_sample"]) for row in rows])


def widths_of(record: Record) -> Widths:
    """The configuration of a trial."""
    tp, dp, pp, size = (int(record[key]) for key in ("tp", "dp", "pp", "micro_batch"))
    return Widths(tp, dp, pp, size, tuple(json.loads(record["layer_boundaries"])))


def rows(folder: Path = DATA) -> Iterator[Row]:
    """AMP's formula beside the predictions AMP published."""
    for name, (nodes, shares) in CLUSTERS.items():
        layers = profile(shares, folder)
        for record in read(folder / name):
            widths = widths_of(record)
            predicted = amp_seconds(layers, widths, nodes, GLOBAL_BATCH)
            label = f"{name} b={widths.microbatch_size} tp={widths.tp} dp={widths.dp} pp={widths.pp}"
            yield Row(label, name, predicted, float(record["amp_predicted_s"]))


def spearman(predicted: list[float], measured: list[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured)[0])  # type: ignore[index]


def finished(name: str, folder: Path = DATA) -> list[Record]:
    """Trials that ran to the end."""
    return [record for record in read(folder / name) if math.isfinite(float(record["measured_s"]))]


def main() -> None:
    """Print the verdict."""
    given = arguments(__doc__, DATA).parse_args()
    found = list(rows(given.data))
    show(found, BAR, "s", given.json, every_row=False)
    if given.json:
        return
    for name in CLUSTERS:
        records = finished(name, given.data)
        measured = [float(record["measured_s"]) for record in records]
        theirs = [float(record["amp_predicted_s"]) for record in records]
        print(f"{name}: Spearman of AMP's formula {spearman(theirs, measured):.3f}")


if __name__ == "__main__":
    main()
