"""The matrix of the executor: a fixed sample of schedules, models, widths, sharding and memory policies."""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path

from cells import Cell

from stagewright.errors import StagewrightError
from stagewright.schedule.builders import BUILDERS, build, options_of

NUM_CELLS = 132
ASYNCHRONOUS = {"pipedream", "pipedream-2bw"}
"""Families that train with old weights, which are simulated only."""
PER_TEST = 6
SEED = 4

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "head_dim": 8,
}
SKIP_NET = f"{Path(__file__).parent / 'networks.py'}:skip_net"
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "tiny-llama": ("fp64", SMALL | {"num_key_value_heads": 2}),
    "tiny-gpt2": ("fp64", {"n_embd": 32, "vocab_size": 96}),
    "tiny-gemma": ("fp64", SMALL | {"num_key_value_heads": 1}),
    "tiny-t5": ("fp64", {"d_model": 32, "d_ff": 64, "d_kv": 8, "vocab_size": 96}),
    "tiny-vit": ("fp64", {"hidden_size": 32, "intermediate_size": 64}),
    "tiny-mixtral": ("fp32", SMALL | {"num_key_value_heads": 2}),
    "tiny-deepseek-v3": ("fp32", {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}),
    "tiny-nemotron-h": ("fp32", {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}),
    SKIP_NET: ("fp64", {}),
}
"""Precision and overrides; experts have no float64 kernel."""

WIDTHS = [(1, 2), (2, 1), (2, 2), (2, 2), (2, 2), (4, 1), (4, 2)]
"""Pipeline and data-parallel widths, as often as they are drawn."""
POLICIES = ["keep", "keep", "recompute", "some", "reruns", "offload"]


def matrix() -> list[Cell]:
    """The cells, every model, schedule, level and policy among them."""
    rng = random.Random(SEED)
    models, schedules = list(MODELS), sorted(set(BUILDERS) - ASYNCHRONOUS)
    found: list[Cell] = []
    while len(found) < NUM_CELLS:
        model, schedule = models[len(found) % len(models)], schedules[len(found) % len(schedules)]
        pp, dp = rng.choice(WIDTHS)
        dtype, overrides = MODELS[model]
        cell = Cell(
            model, schedule, rng.randrange(4) if dp > 1 else 0, dp, pp, rng.choice([None, 2, 3, 4]), rng.choice(POLICIES),
            rng.choice([2, 3, 4, 5]), dtype, tuple(sorted(overrides.items())),
        )  # fmt: skip
        if _exists(cell) and cell not in found:
            found.append(cell)
    return found


def _exists(cell: Cell) -> bool:
    """Whether the schedule has such a program, of no more stages than a small model is worth cutting into."""
    if cell.num_chunks is not None and "num_chunks" not in options_of(cell.schedule):
        return False  # it has one number alone, which is drawn as None
    try:
        program = build(cell.schedule, cell.pp, cell.num_microbatches, cell.num_chunks)
    except StagewrightError:
        return False
    return program.num_stages <= 8


def batches() -> list[list[Cell]]:
    """Cells that one group of processes trains one after the other."""

    def key(cell: Cell) -> tuple[int, str]:
        return cell.pp * cell.dp, cell.model

    found: list[list[Cell]] = []
    for _, group in groupby(sorted(matrix(), key=key), key=key):
        cells = list(group)
        found += [cells[first : first + PER_TEST] for first in range(0, len(cells), PER_TEST)]
    return found
