"""Streamed weights: training equal to plain training, in the device memory that was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA, Cell, predicted
from test_sharded import check_equal, outcomes

from stagewright.tracing.models.lora import Lora

pytestmark = pytest.mark.multiprocess

LOOPED = Cell(schedule="breadth-first", num_chunks=4, dp=1, policy="recompute", overrides=SMALL_LLAMA)
ADAPTED = Lora(rank=4, alpha=8)


def streamed(cell: Cell) -> Cell:
    """A cell with its weights, and its optimizer unless the base is frozen, on the host."""
    return replace(cell, streamed=True, host_optimizer=() if cell.lora else tuple(range(cell.pp)))


@pytest.mark.parametrize(
    "cells",
    [
        [LOOPED, replace(LOOPED, policy="keep", dtype="bf16"), replace(LOOPED, lora=ADAPTED)],
        [
            replace(LOOPED, schedule="1f1b", num_chunks=None, num_units=2),
            replace(LOOPED, schedule="zb-h1", num_chunks=None, num_units=2, policy="keep"),
            replace(LOOPED, model="tiny-gpt2", num_chunks=2, overrides=SMALL_GPT2),
        ],
        [replace(LOOPED, pp=1), replace(LOOPED, pp=1, dtype="fp16", lora=ADAPTED)],
    ],
    ids=["looped", "in turn", "one device"],
)
def test_training_is_the_same_wherever_the_weights_are(cells: list[Cell], tmp_path: Path) -> None:
    found = outcomes([*cells, *map(streamed, cells)], tmp_path)
    for cell in cells:
        there = streamed(cell)
        assert [rank.losses for rank in found[there]] == [rank.losses for rank in found[cell]]
        check_equal(there, found[there])
        bytes_of_ranks = predicted(there.plan(tmp_path))
        assert [rank.peak_bytes for rank in found[there]] == bytes_of_ranks
        on_devices = predicted(cell.plan(tmp_path))
        assert all(less < more for less, more in zip(bytes_of_ranks, on_devices, strict=True))
