"""vTrain's table of one node is composed, not measured: exact in layers and microbatches, to the nanosecond."""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
import pytest
import runtimes

ROUNDING_MS = 2e-6
"""The table is written in steps of a nanosecond."""
BOUNDARY_BYTES_PER_MS = 25 * 2**30 / 1e3
"""A quarter of the 800 Gbit/s, in powers of two, that vTrain's predictor.py assumes between stages."""

Group = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def groups() -> dict[Group, list[tuple[float, float, float]]]:
    """(layers, microbatches, ms) of steps without replicas by hidden size, tp, pp and microbatch, where there are six."""
    path = runtimes.DATA / "megatron_time" / "megatron_a100_single_node.csv"
    steps: dict[Group, list[tuple[float, float, float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            hidden, tp, pp, size, dp = (
                int(record[key]) for key in ("hidden", "tp", "pp", "micro_batch", "dp")
            )
            if dp == 1:
                count = int(record["global_batch"]) / size
                steps[hidden, tp, pp, size].append(
                    (float(record["layers"]), count, float(record["iteration_ms"]))
                )
    return {group: rows for group, rows in steps.items() if len(rows) >= 6}


def _coefficients(rows: list[tuple[float, float, float]]) -> tuple[np.ndarray, float, int]:
    """Return the seconds per microbatch, per microbatch and layer, per step, and per step and layer; the largest residual;
    and how many of the four the rows determine."""
    layers, counts, seconds = np.array(rows).T
    terms = np.stack([counts, counts * layers, np.ones_like(layers), layers], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(terms, seconds, rcond=None)
    return solution, float(abs(terms @ solution - seconds).max()), int(rank)


def test_four_numbers_make_every_step_of_a_group(
    groups: dict[Group, list[tuple[float, float, float]]],
) -> None:
    fits = {group: _coefficients(rows) for group, rows in groups.items()}
    assert len(fits) >= 30
    assert all(residual < ROUNDING_MS for _, residual, _ in fits.values())


def test_further_stages_add_four_boundaries_at_an_assumed_rate(
    groups: dict[Group, list[tuple[float, float, float]]],
) -> None:
    compared = 0
    for (hidden, tp, pp, size), rows in groups.items():
        deeper = groups.get((hidden, tp, 4, size))
        if pp != 2 or deeper is None:
            continue
        (two, _, rank), (four, _, rank_of_four) = _coefficients(rows), _coefficients(deeper)
        if min(rank, rank_of_four) == 4:
            boundary = 2 * 2 * size * 1024 * hidden
            assert four[2] - two[2] == pytest.approx(4 * boundary / BOUNDARY_BYTES_PER_MS, rel=1e-5)
            compared += 1
    assert compared >= 5
