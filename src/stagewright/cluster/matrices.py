"""Measured links in CSV files: one row per sender, one column per receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.documents import read_csv
from stagewright.errors import InputError
from stagewright.files import write_whole
from stagewright.units import parse_bytes

_MATRICES = ("bandwidth", "latency_s")
_UNIT_KEY = "bandwidth_unit"


def read_matrix(path: Path, scale: float = 1.0) -> tuple[tuple[float, ...], ...]:
    """Read the square matrix in a CSV file, times `scale`; a line and a column of names are optional. The diagonal may be
    empty.

    Raises:
        InputError: names the file, the row and the rule.
    """
    rows = read_csv(path, "matrix", "give a CSV file with one row per sender")
    if rows and not any(map(_is_number, rows[0])):
        rows = rows[1:]
    size = len(rows)
    matrix = []
    for number, row in enumerate(rows):
        cells = row[1:] if len(row) == size + 1 else row
        if len(cells) != size:
            raise InputError(
                f"{path}: row {number} has {len(cells)} entries for {size} rows: give a square matrix"
            )
        places = (f"{path}: row {number}, column {column}" for column in range(size))
        matrix.append(
            tuple(
                _entry(cell, number == column, place) * scale
                for column, (cell, place) in enumerate(zip(cells, places, strict=True))
            )
        )
    return tuple(matrix)


def with_matrices(measured: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the `measured` table of a cluster file with the matrices of the CSV files it names, relative to `folder`.

    `bandwidth_unit` (such as ``MB/s``) is the unit in the file; bytes per second without it.
    """
    filled = {key: value for key, value in measured.items() if key != _UNIT_KEY}
    sources = dict(measured.get("sources", {}))
    if _UNIT_KEY in measured and not isinstance(measured.get("bandwidth"), str):
        raise InputError(
            f"{_UNIT_KEY} = {measured[_UNIT_KEY]!r} is that of a CSV file, but bandwidth names none: leave it out, and give "
            "bytes per second"
        )
    for key in _MATRICES:
        named = measured.get(key)
        if isinstance(named, str):
            scale = _scale(measured.get(_UNIT_KEY, "B/s")) if key == "bandwidth" else 1.0
            filled[key] = read_matrix(folder / named, scale)
            sources.setdefault(key, named)
    return filled | {"sources": sources}


def write_matrices(document: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Write the matrices of a cluster's `document` to CSV files next to `target`; return the document that names them."""
    measured = dict(document["measured"])
    for key in _MATRICES:
        if key in measured:
            file = target.with_name(f"{target.stem}-{key.removesuffix('_s')}.csv")
            _write_matrix(file, measured[key])
            measured[key] = file.name
    return {**document, "measured": measured}


def _write_matrix(path: Path, matrix: Sequence[Sequence[float]]) -> None:
    rows = (
        ",".join("" if sender == receiver else f"{x:.6g}" for receiver, x in enumerate(row))
        for sender, row in enumerate(matrix)
    )
    write_whole(path, "".join(f"{row}\n" for row in rows))


def _scale(unit: object) -> float:
    """
    >>> _scale("MB/s")
    1000000.0
    """
    try:
        if isinstance(unit, str) and unit.endswith("/s"):
            return float(parse_bytes(f"1 {unit.removesuffix('/s')}"))
    except InputError:
        pass  # said below, with the key
    raise InputError(f"{_UNIT_KEY} = {unit!r}: write bytes per second, e.g. MB/s or GB/s")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _entry(text: str, is_diagonal: bool, place: str) -> float:
    if is_diagonal and not text.strip():
        return 0.0
    if not _is_number(text):
        raise InputError(f"{place}: '{text}' is not a number: give one figure per pair")
    return float(text)
