"""Half precision: gradients added up in float32, master weights, and a scaled loss in fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_LLAMA, Cell
from plans import make_plan
from test_sharded import check_equal, check_memory, outcomes

from multiprocess import run_ranks
from stagewright.planning.plan import load_plan

pytestmark = pytest.mark.multiprocess


def test_half_precision_equals_plain(tmp_path: Path) -> None:
    cells = [
        Cell(schedule="1f1b", dp=1, dtype="fp16", overrides=SMALL_LLAMA),
        Cell(schedule="zb-v", dp=1, dtype="fp16", policy="recompute", overrides=SMALL_LLAMA),
        Cell(sharding=3, pp=1, dtype="fp16", overrides=SMALL_LLAMA),
        Cell(schedule="zb-h1", dp=1, dtype="bf16", overrides=SMALL_LLAMA),
    ]
    for cell, ranks in outcomes(cells, tmp_path).items():
        check_equal(cell, ranks)
        check_memory(cell, ranks, tmp_path)


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(tmp_path: Path) -> None:
    paths = []
    for sharding, (pp, dp) in ((0, (2, 1)), (2, (1, 2))):
        path = tmp_path / f"{sharding}.json"
        make_plan(
            path,
            pp=pp,
            dp=dp,
            dtype="fp16",
            overrides=dict(SMALL_LLAMA),
            sharding=sharding,
            loss_scale=2.0**24,
        )
        paths.append(str(path))
    for ranks in zip(*run_ranks(scales, 2, paths, timeout=90), strict=True):
        values, changed, norms = ranks[0]
        num_skipped = changed.index(True)
        assert 0 < num_skipped < 12 and all(changed[num_skipped : num_skipped + 2])
        assert values[:num_skipped] == [2.0 ** (23 - step) for step in range(num_skipped)]
        assert values[num_skipped + 1] == 2 * values[num_skipped], "two good steps double it"
        assert all((norm < 1e3) == good for norm, good in zip(norms, changed, strict=True))
        for other in ranks:
            assert other[0] == values and other[1] == changed, "every rank does the same"


def scales(rank: int, num_ranks: int, paths: list[str]) -> list[tuple[list[float], list[bool], list[float]]]:
    """For each plan: the scale after every step, whether the step changed parameters, and its norm."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    found = []
    for path in paths:
        session = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
        assert session.loss_scale is not None
        values, changed, norms = [], [], []
        before = _parameters(session)
        for step in range(13):
            norms.append(session.train_step(step).gradient_norm)
            after = _parameters(session)
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            before = after
            values.append(session.loss_scale.value)
            if changed.count(True) == 2:
                break
        found.append((values, changed, norms))
        dist.barrier()
    dist.destroy_process_group()
    return found


def _parameters(session: Any) -> list[Any]:
    return [parameter.clone() for parameter in session.weights.parameters.values()]
