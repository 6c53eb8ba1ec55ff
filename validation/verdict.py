"""Predictions beside measurements: the table, its mean and median, and its worst row last."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One prediction; `group` is what a breakdown is made by, `half` says whether constants saw the row."""

    label: str
    group: str
    predicted: float
    measured: float
    half: str = "fit"

    @property
    def error(self) -> float:
        """Relative to the measurement, with its sign."""
        return self.predicted / self.measured - 1


def half_of(shape: str) -> str:
    """The half of a set that what was measured is in, by its name alone."""
    return "other" if zlib.crc32(shape.encode()) % 2 else "fit"


@dataclass(frozen=True)
class Summary:
    """Errors are absolute fractions of the measurements."""

    name: str
    num_rows: int
    mean: float
    median: float
    bias: float
    worst: Row

    def __str__(self) -> str:
        return (
            f"{self.name:<34} {self.num_rows:>5} rows  mean {self.mean:6.2%}  median {self.median:6.2%}  "
            f"bias {self.bias:+7.2%}  worst {self.worst.error:+.2%}"
        )


def summary(name: str, rows: Sequence[Row]) -> Summary:
    """The errors of `rows`, of which there must be at least one."""
    sizes = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    bias = statistics.fmean(row.error for row in rows)
    return Summary(name, len(rows), statistics.fmean(sizes), statistics.median(sizes), bias, worst)


def grouped(rows: Iterable[Row]) -> list[Summary]:
    """One summary per group, in order of the names."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [summary(name, groups[name]) for name in sorted(groups)]


def document(rows: Sequence[Row], bar: float) -> dict[str, Any]:
    """Everything a reader of `--json` needs."""
    whole = summary("all", rows)
    return {
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "groups": [_plain(item) for item in grouped(rows)],
        "all": _plain(whole),
        "bar": bar,
    }


def _plain(item: Summary) -> dict[str, Any]:
    return {
        "name": item.name,
        "num_rows": item.num_rows,
        "mean": item.mean,
        "median": item.median,
        "bias": item.bias,
        "worst": item.worst.label,
        "worst_error": item.worst.error,
    }


def show(rows: Sequence[Row], bar: float, unit: str, as_json: bool, every_row: bool = True) -> None:
    """Print the table, or with `as_json` the document."""
    if as_json:
        json.dump(document(rows, bar), sys.stdout, indent=1)
        print()
        return
    if every_row:
        for row in rows:
            print(f"{row.label:<64} {row.predicted:>14.6g} {row.measured:>14.6g} {unit} {row.error:+8.2%}")
    for item in grouped(rows):
        print(item)
    for half in sorted({row.half for row in rows}):
        print(summary(f"half '{half}'", [row for row in rows if row.half == half]))
    whole = summary("all", rows)
    print(f"{whole}  (bar: mean {bar:.1%})")
    print(
        f"worst: {whole.worst.label}: predicted {whole.worst.predicted:.6g}, measured {whole.worst.measured:.6g} {unit}"
    )


def arguments(description: str | None, data: Path | None = None) -> argparse.ArgumentParser:
    """The options every script has."""
    parser = argparse.ArgumentParser(description=description)
    if data is not None:
        parser.add_argument(
            "--data", type=Path, default=data, help="folder of measurements with the same columns"
        )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    return parser
