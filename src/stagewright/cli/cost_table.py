"""Cost tables: measured or published costs per layer, instead of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.documents import read_csv_table, read_json
from stagewright.errors import InputError, nearest
from stagewright.limits import MOST_ROWS, check_bytes, check_count, check_seconds

if TYPE_CHECKING:
    from stagewright.planning.joint.problem import LayerTable

_REQUIRED = ("layer", "forward_s", "input_grad_s", "weight_grad_s")


@dataclass(frozen=True)
class LayerRow:
    """A row of a cost table: seconds and bytes of one microbatch on one layer."""

    layer: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0


def read_cost_table(path: Path) -> list[LayerRow]:
    """Return the rows of a CSV file with a header, or of a JSON list of objects, in the order of the model. Raises
    `InputError` with the file, the row and the error."""
    rows = read_json(path, "cost table") if path.suffix == ".json" else read_csv_table(path, "cost table")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} has no rows: write one per layer, with {', '.join(_REQUIRED)}")
    check_count(len(rows), MOST_ROWS, f"the number of rows of {path}", "give one per layer of a model")
    return [_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def layer_table(rows: Sequence[LayerRow]) -> LayerTable:
    """Return the rows as input of the joint search; everything that a forward saves is kept until the weight gradient."""
    from stagewright.planning.joint.problem import LayerTable

    def column(name: str) -> list[float]:
        return [getattr(row, name) for row in rows]

    return LayerTable.of(
        column("forward_s"), column("input_grad_s"), column("weight_grad_s"),
        parameter_bytes=column("parameter_bytes"), saved_bytes=column("activation_bytes"),
        boundary_bytes=column("boundary_bytes"),
    )  # fmt: skip


def _row(row: Any, where: str) -> LayerRow:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: expected an object with {', '.join(_REQUIRED)}")
    columns = [field.name for field in fields(LayerRow)]
    for key in row:
        if key not in columns:
            raise InputError(f"{where}: unknown column '{key}'{nearest(str(key), columns)}")
    if missing := [key for key in _REQUIRED if row.get(key) in (None, "")]:
        raise InputError(f"{where}: {missing[0]} is missing")
    figures = {key: _figure(value, key, where) for key, value in row.items() if key != "layer"}
    return LayerRow(layer=str(row["layer"]), **figures)


def _figure(value: Any, key: str, where: str) -> float:
    try:
        figure = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {key} = '{value}' is not a number") from None
    return (check_seconds if key.endswith("_s") else check_bytes)(figure, f"{where}: {key}")
