"""Judge predicted differences: what a change of one thing gains, beside published runs that differ in it alone."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pipelines
import runtimes
from runtimes import Asked, Judged, Record, Source, answers
from verdict import arguments

MOST_POINTS = 4.0
"""Bar: mean size of the difference between predicted and measured change, in percentage points."""
LEAST_RIGHT = 0.95
"""Bar: fraction of the changes whose sign is right."""
MEASURED, COMPOSED = "all changes", "all changes of composed steps"
"""Summaries: of runs, which the bars are for, and of steps that vTrain's simulator composed."""
_NOISE_POINTS = 1.0
"""Measured changes below are noise, whose sign is not judged."""


@dataclass(frozen=True)
class Change:
    """A kind of change: runs of a table that have the same values in the columns `same` and others in `changed`."""

    name: str
    table: str
    same: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def source(self) -> Source:
        return (runtimes.SOURCES | pipelines.SOURCES | pipelines.COMPARED)[self.table]

    @property
    def is_measured(self) -> bool:
        """Whether its table is of runs; steps that a simulator composed have no part in the verdict."""
        return runtimes.COMPOSED not in self.source.bars


@dataclass(frozen=True)
class Pair:
    """Two runs and their change of step time in per cent, from the first to the second."""

    change: str
    label: str
    predicted: float
    measured: float

    @property
    def points(self) -> float:
        return abs(self.predicted - self.measured)

    @property
    def is_right(self) -> bool:
        return self.predicted * self.measured > 0


_VTRAIN = ("hidden", "layers", "heads", "seq_len", "num_gpus", "global_batch", "dp")
CHANGES = (
    Change("tensor parallelism for pipeline", "megatron_a100_single_node.csv", (*_VTRAIN, "micro_batch"), ("tp", "pp")),
    Change("microbatch size", "megatron_a100_single_node.csv", (*_VTRAIN, "tp", "pp"), ("micro_batch",)),
    Change(
        "schedule", "zero_bubble_measured.csv",
        ("layers", "hidden", "pp", "micro_batch", "n_microbatches"), ("schedule",),
    ),
    Change("recomputation", "megatron_selene_a100.csv", ("hidden", "layers", "num_gpus", "global_batch"), ("recompute",)),
    Change(
        "degrees", "bloom_megatron_deepspeed_a100.csv",
        ("layers", "hidden", "heads", "n_gpus", "global_batch_seqs", "seq_len", "precision", "date"),
        ("tp", "pp", "dp", "micro_batch"),
    ),
    Change(
        "eight bits", "dgxc_benchmarking.csv",
        ("release", "n_gpus", "layers", "gbs", "tp", "pp", "cp", "vp", "mbs", "seq"), ("precision",),
    ),
    Change(
        "recomputation, compilation", "torchtitan_benchmarks.csv",
        ("table", "model", "n_gpus", "seq_len", "local_batch", "tp", "pp", "cp"), ("technique", "ac"),
    ),
    Change("tensor parallelism", "megatron_bridge_skills.csv", ("model", "task", "gpus", "recompute"), ("tp",)),
    Change(
        "dispatch during another microbatch", "megatron_bridge_skills.csv",
        ("model", "task", "gpus", "tp", "ep", "global_batch"), ("variant",),
    ),
)  # fmt: skip


def pairs(change: Change, records: list[Record], pool: Executor) -> Iterator[Pair]:
    """Every two runs that differ in what `change` names, and in nothing else that the table states."""
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], Asked, Judged]]] = defaultdict(list)
    for record in records:
        if not {*change.same, *change.changed} <= record.keys():
            continue
        read = change.source.reader(record)
        if isinstance(read, str):
            continue
        asked, (figure, *_) = read
        if figure.unit == "s":
            values = tuple(record[column] for column in change.changed)
            groups[tuple(record[column] for column in change.same)].append((values, asked, figure))
    members = [member for group in groups.values() if len(group) > 1 for member in group]
    found = answers([asked for _, asked, _ in members], pool)
    predictions = {id(member): prediction for member, prediction in zip(members, found, strict=True)}
    for group in groups.values():
        for first, second in itertools.combinations(group, 2):
            before, after = predictions[id(first)], predictions[id(second)]
            if first[0] == second[0] or isinstance(before, str) or isinstance(after, str):
                continue
            predicted = second[2].take(after) / first[2].take(before) - 1
            measured = second[2].measured / first[2].measured - 1
            label = f"{first[1].label}: {' '.join(first[0])} -> {' '.join(second[0])}"
            yield Pair(change.name, label, 100 * predicted, 100 * measured)


def document(judged: list[Pair]) -> dict[str, Any]:
    """Return what `--json` prints of pairs."""
    clear = [pair for pair in judged if abs(pair.measured) >= _NOISE_POINTS]
    return {
        "pairs": len(judged),
        "clear": len(clear),
        "right": sum(pair.is_right for pair in clear),
        "mean_points": statistics.fmean(pair.points for pair in judged),
        "median_points": statistics.median(pair.points for pair in judged),
        "worst": asdict(max(judged, key=lambda pair: pair.points)),
    }


def _show(name: str, found: dict[str, Any]) -> None:
    worst = found["worst"]
    print(
        f"{name}: {found['pairs']} pairs, sign right in {found['right']} of {found['clear']} changes of at least "
        f"{_NOISE_POINTS:.0f} %, off by {found['mean_points']:.1f} points on average, {found['median_points']:.1f} in the "
        "median"
    )
    print(
        f"  worst: {worst['label']}: {worst['predicted']:+.1f} % predicted, {worst['measured']:+.1f} % measured"
    )


def main() -> None:
    """Print how predicted changes stand to measured ones; ends with 1 where a bar is missed."""
    parser = arguments(__doc__, runtimes.DATA)
    parser.add_argument("--only", choices=[change.name for change in CHANGES], help="one kind of change")
    given = parser.parse_args()
    documents: dict[str, Any] = {}
    everything: dict[str, list[Pair]] = {MEASURED: [], COMPOSED: []}
    with ProcessPoolExecutor() as pool:
        for change in CHANGES:
            path: Path = given.data / change.source.folder / change.table
            path = path if path.exists() else given.data / change.table
            if (given.only and given.only != change.name) or not path.exists():
                continue
            with path.open(newline="", encoding="utf-8") as file:
                judged = list(pairs(change, list(csv.DictReader(file)), pool))
            if not judged:
                continue
            everything[MEASURED if change.is_measured else COMPOSED] += judged
            documents[f"{change.table}, {change.name}"] = found = document(judged)
            if not given.json:
                _show(f"{change.table}, {change.name}", found)
    wholes = {name: document(judged) for name, judged in everything.items() if judged}
    if not wholes:
        sys.exit("no pair of runs was found")
    if given.json:
        json.dump(documents | wholes, sys.stdout, indent=1)
        print()
    else:
        for name, whole in wholes.items():
            _show(name, whole)
    whole = wholes.get(MEASURED)
    if whole and (whole["right"] < LEAST_RIGHT * whole["clear"] or whole["mean_points"] > MOST_POINTS):
        sys.exit(f"above the bars: signs right in {LEAST_RIGHT:.0%}, {MOST_POINTS:.0f} points on average")


if __name__ == "__main__":
    main()
