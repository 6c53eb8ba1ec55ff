"""Cost tables: measured or published costs per layer, in place of a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.documents import read_csv_table, read_json
from stagewright.errors import InputError, nearest
from stagewright.limits import MOST_ROWS, check_bytes, check_count, check_seconds

if TYPE_CHECKING:
    from stagewright.planning.joint.problem import LayerTable
    from stagewright.simulation import StageCosts

_REQUIRED = ("layer", "forward_s", "input_grad_s", "weight_grad_s")


@dataclass(frozen=True)
class LayerCosts:
    """One row: seconds and bytes of one microbatch on one layer."""

    layer: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def read_cost_table(path: Path) -> list[LayerCosts]:
    """The rows of a CSV file with a header, or of a JSON list of objects, in the order of the model. Raises `InputError`
    with the file, the row and what is wrong with it."""
    rows = read_json(path, "cost table") if path.suffix == ".json" else read_csv_table(path, "cost table")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} has no rows: write one per layer, with {', '.join(_REQUIRED)}")
    check_count(len(rows), MOST_ROWS, f"the number of rows of {path}", "give one per layer of a model")
    return [_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def layer_table(rows: Sequence[LayerCosts]) -> LayerTable:
    """The rows as the joint search takes them; everything that a forward saves is held until the weight gradient."""
    from stagewright.planning.joint.problem import LayerTable

    def column(name: str) -> list[float]:
        return [getattr(row, name) for row in rows]

    return LayerTable.of(
        column("forward_s"), column("input_grad_s"), column("weight_grad_s"),
        parameter_bytes=column("parameter_bytes"), saved_bytes=column("activation_bytes"),
        boundary_bytes=column("boundary_bytes"),
    )  # fmt: skip


def stage_costs(layers: Sequence[LayerCosts], num_stages: int) -> StageCosts:
    """Costs of `num_stages` stages of consecutive layers, the slowest as fast as can be.

    Parameters count as the bytes that are always there; transfers are not part of it. Raises `InputError` where there are
    fewer layers than stages."""
    from stagewright.simulation import StageCosts

    if len(layers) < num_stages:
        raise InputError(
            f"{num_stages} stages need as many layers, but the cost table has {len(layers)}: use fewer stages"
        )
    stages = balanced([layer.seconds for layer in layers], num_stages)

    def column(name: str) -> list[float]:
        return [sum(getattr(layers[index], name) for index in stage) for stage in stages]

    passes = map(column, ("forward_s", "input_grad_s", "weight_grad_s"))
    return StageCosts.of(
        *passes, saved_bytes=column("activation_bytes"), base_bytes=column("parameter_bytes")
    )


def balanced(seconds: Sequence[float], num_parts: int) -> list[range]:
    """Consecutive ranges, none empty, whose largest sum is as small as can be.

    >>> balanced([1, 1, 1, 3], 2), balanced([5, 1, 1], 3)
    ([range(0, 3), range(3, 4)], [range(0, 1), range(1, 2), range(2, 3)])
    """
    count = len(seconds)
    # So many entries from the start -> the largest sum and the ends of the parts they have been put into.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_parts):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (largest, ends) in best.items():
            sums = itertools.accumulate(seconds[start:])
            for end, total in enumerate(sums, start=start + 1):
                candidate = (max(largest, total), (*ends, end))
                if end not in following or candidate[0] < following[end][0]:
                    following[end] = candidate
        best = following
    return [range(low, high) for low, high in itertools.pairwise((0, *best[count][1]))]


def _row(row: Any, where: str) -> LayerCosts:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: expected an object with {', '.join(_REQUIRED)}")
    known = [field.name for field in fields(LayerCosts)]
    for key in row:
        if key not in known:
            raise InputError(f"{where}: unknown column '{key}'{nearest(str(key), known)}")
    if missing := [key for key in _REQUIRED if row.get(key) in (None, "")]:
        raise InputError(f"{where}: {missing[0]} is missing")
    figures = {key: _figure(value, key, where) for key, value in row.items() if key != "layer"}
    return LayerCosts(layer=str(row["layer"]), **figures)


def _figure(value: Any, key: str, where: str) -> float:
    try:
        figure = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {key} = '{value}' is not a number") from None
    return (check_seconds if key.endswith("_s") else check_bytes)(figure, f"{where}: {key}")
