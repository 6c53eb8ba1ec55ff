"""Optimizer state on the host: the same training, to the last bit, in the device memory that was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cells import SMALL_LLAMA, Cell, predicted
from test_sharded import check_equal, check_memory, outcomes

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import staged_model_of
from stagewright.planning.plan import load_plan

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    "cells",
    [
        [Cell(dp=1, dtype="fp32", overrides=SMALL_LLAMA), Cell(dp=1, dtype="bf16", overrides=SMALL_LLAMA)],
        [Cell(pp=1, sharding=1, dtype="fp16", overrides=SMALL_LLAMA), Cell(pp=1, sharding=3, overrides=SMALL_LLAMA)],
    ],
    ids=["pipeline", "replicas"],
)  # fmt: skip
def test_training_is_the_same_wherever_the_optimizer_is(cells: list[Cell], tmp_path: Path) -> None:
    moved = [replace(cell, host_optimizer=(0,)) for cell in cells]
    found = outcomes([*cells, *moved], tmp_path)
    for cell, there in zip(cells, moved, strict=True):
        assert [rank.losses for rank in found[there]] == [rank.losses for rank in found[cell]]
        check_equal(there, found[there])
        check_memory(there, found[there], tmp_path)
        least = 2 * _host_bytes(there, tmp_path) // 5  # the host also keeps a copy and receives gradients
        assert predicted(cell.plan(tmp_path))[0] - predicted(there.plan(tmp_path))[0] >= least > 0


def _host_bytes(cell: Cell, folder: Path) -> int:
    return staged_model_of(load_plan(cell.plan(folder)), load_cluster("8x-h100")).resident(0).host_bytes
