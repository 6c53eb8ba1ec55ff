"""The whole matrix of the executor: equal to plain training, in the bytes promised, with the traffic of the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cells import Cell, Outcome, expected_traffic, predicted, train
from matrix import ASYNCHRONOUS, MODELS, batches, matrix

from multiprocess import run_ranks
from stagewright.planning.plan import load_plan
from stagewright.schedule.builders import BUILDERS

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
"""Of sums in another order, relative to the largest element."""
UNTRIED = {"tiny-gemma", "tiny-vit", "tiny-deepseek-v3", "tiny-nemotron-h"}


def test_the_matrix_has_something_of_everything() -> None:
    cells = matrix()
    assert len(cells) >= 120 and len(set(cells)) == len(cells)
    assert {cell.schedule for cell in cells} == set(BUILDERS) - ASYNCHRONOUS
    assert {cell.model for cell in cells} == set(MODELS)
    assert {cell.policy for cell in cells} == {"keep", "recompute", "some", "reruns", "offload"}
    assert {(cell.pp, cell.dp) for cell in cells} >= {(1, 2), (2, 1), (2, 2), (4, 1)}
    assert {cell.sharding for cell in cells if cell.dp > 1} == {0, 1, 2, 3}


@pytest.mark.multiprocess
def test_models_that_no_other_test_trains(tmp_path: Path) -> None:
    """The part of the matrix that is always tried, besides `test_equality` and `test_sharded`."""
    chosen = {cell.model: cell for cell in matrix() if cell.pp * cell.dp == 2 and cell.model in UNTRIED}
    assert set(chosen) == UNTRIED
    check(list(chosen.values()), tmp_path)


@pytest.mark.matrix
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cells", batches(), ids=lambda cells: f"{len(cells)} {cells[0]}")
def test_cells(cells: Sequence[Cell], tmp_path: Path) -> None:
    check(cells, tmp_path)


def check(cells: Sequence[Cell], tmp_path: Path) -> None:
    """Trains all of them, by the same group of processes."""
    paths = [cell.plan(tmp_path) for cell in cells]
    num_ranks = cells[0].pp * cells[0].dp
    ranks = run_ranks(train, num_ranks, list(map(str, paths)), timeout=1000)
    wrong = [
        problem
        for index, (cell, path) in enumerate(zip(cells, paths, strict=True))
        for problem in problems(cell, path, [rank[index] for rank in ranks])
    ]
    assert not wrong, "\n".join(wrong)


def problems(cell: Cell, path: Path, ranks: Sequence[Outcome]) -> list[str]:
    """What one cell does not keep to."""
    deviations: list[str] = []
    wanted, traffic = predicted(path), expected_traffic(load_plan(path))
    tolerance = TOLERANCE[cell.dtype]
    for rank, outcome in enumerate(ranks):
        where, pipeline_rank = f"{cell}, rank {rank}", rank // cell.dp
        if outcome.loss != 0.0:
            deviations.append(f"{where}: the loss is off by {outcome.loss}")
        for name, difference in outcome.gradients.items():
            if not difference <= (tolerance if name in outcome.reordered else 0.0):
                deviations.append(f"{where}: gradient of {name} is off by {difference}")
        if outcome.peak_bytes != wanted[pipeline_rank]:
            deviations.append(f"{where}: {outcome.peak_bytes} bytes, predicted {wanted[pipeline_rank]}")
        if outcome.traffic != traffic[pipeline_rank]:
            deviations.append(f"{where}: traffic {outcome.traffic}, expected {traffic[pipeline_rank]}")
    return deviations
