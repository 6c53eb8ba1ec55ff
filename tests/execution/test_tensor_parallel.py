"""Ranks that share layers learn what the plain model learns: losses, gradients and updates, over real processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_LLAMA
from plans import make_plan

from multiprocess import run_ranks

pytestmark = pytest.mark.multiprocess

TOLERANCES = {"fp64": 1e-12, "fp32": 2e-5}


@dataclass(frozen=True)
class Case:
    """A model on tp x pp x dp ranks."""

    model: str
    tp: int
    pp: int = 1
    dp: int = 1
    dtype: str = "fp64"
    overrides: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return f"{self.model} tp {self.tp} pp {self.pp} dp {self.dp} {self.dtype}"

    def plan(self, folder: Path) -> Path:
        path = folder / f"{str(self).replace(' ', '-')}.json"
        make_plan(
            path, self.model, "1f1b", self.pp, self.dp, 2, self.dtype, overrides=dict(self.overrides),
            microbatch_size=2, sequence_length=16, tp=self.tp,
        )  # fmt: skip
        return path


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.mark.parametrize("case", [Case("tiny-llama", 2, overrides=SMALL_LLAMA)], ids=str)
def test_shared_layers_equal_whole_ones(case: Case, tmp_path: Path) -> None:
    path = case.plan(tmp_path)
    found = run_ranks(train, case.tp * case.pp * case.dp, str(path), timeout=120)
    tolerance = TOLERANCES[case.dtype]
    for rank in found:
        assert rank["loss"] <= tolerance
        assert {name: off for name, off in rank["gradients"].items() if not off <= tolerance} == {}
    named = {name for rank in found for name in rank["gradients"]}
    assert named == set(found[0]["trained"])


def train(rank: int, num_ranks: int, path: str) -> dict[str, Any]:
    """One batch on this rank, compared with what the plain model finds."""
    import torch
    import torch.distributed as dist
    from cells import Plain

    from stagewright.execution.session import Session
    from stagewright.execution.verification import largest_difference
    from stagewright.planning.plan import load_plan

    dist.init_process_group("gloo")
    plan = load_plan(path)
    session = Session(plan, torch.device("cpu"), None, random_weights=True)
    plain = Plain(plan)
    loss, wanted_loss = session.accumulate(0), plain.loss()
    wanted = plain.gradients(tuple(range(plan.num_microbatches)))
    differences = {
        name: largest_difference(gradient, session.part(name, wanted[name]))
        for name, gradient in session.gradients().items()
    }
    dist.barrier()
    dist.destroy_process_group()
    return {
        "loss": abs(loss - wanted_loss) / abs(wanted_loss),
        "gradients": differences,
        "trained": list(wanted),
    }
