"""A loop of one's own: steps on batches that are handed over, evaluations in between, state and weights by name."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_LLAMA
from plans import make_plan

from multiprocess import run_ranks
from stagewright.errors import InputError
from stagewright.execution.record import load_record
from stagewright.execution.trainer import Trainer

pytestmark = pytest.mark.multiprocess

llama = partial(make_plan, overrides=dict(SMALL_LLAMA), sequence_length=16, num_microbatches=2, num_steps=3)


def test_a_loop_of_ones_own_trains_as_fit_does(tmp_path: Path) -> None:
    """On the batches that the data would give, evaluated and put back in between: its losses are those of `fit`."""
    llama(tmp_path / "plan.json", dp=2, pp=1, sharding=1)
    found = run_ranks(own_loop, 2, str(tmp_path), timeout=60)
    fitted = run_ranks(fit, 2, str(tmp_path), timeout=60)
    assert found[0]["losses"] == found[1]["losses"] == list(fitted[0].losses)
    assert found[0]["again"] == found[0]["losses"][1:]
    assert found[0]["evaluated"][0] > found[0]["evaluated"][1]
    assert "net" not in next(iter(found[0]["weights"])) and found[1]["weights"] == []
    assert found[0]["steps"] == [1, 2, 3]
    lines = (tmp_path / "own" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines[:3]] == found[0]["losses"]
    assert load_record(tmp_path / "fit" / "record.json") == fitted[0] and fitted[1] is None


def fit(rank: int, num_ranks: int, folder: str) -> Any:
    """Train the plan by `fit`."""
    os.environ["LOCAL_RANK"] = str(rank)
    return Trainer(f"{folder}/plan.json", out=f"{folder}/fit", device="cpu", random_weights=True).fit()


def own_loop(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Train it by steps."""
    import torch

    os.environ["LOCAL_RANK"] = str(rank)
    seen: list[int] = []
    callbacks = [lambda step: seen.append(step.number)]
    with Trainer(
        f"{folder}/plan.json", out=f"{folder}/own", device="cpu", random_weights=True, callbacks=callbacks
    ) as trainer:
        batches = [whole(trainer, step) for step in range(3)]
        weights = trainer.weights()
        copied = {name: tensor.clone() for name, tensor in weights.items()}
        evaluated = [trainer.evaluate(batches).loss]
        losses = [trainer.step(batches[0]).loss]
        state = trainer.state_dict()
        losses += [trainer.step(batch).loss for batch in batches[1:]]
        evaluated.append(trainer.evaluate(batches).loss)
        steps = list(seen)
        assert all(torch.equal(weights[name], copied[name]) for name in copied)
        assert not any(torch.equal(tensor, copied[name]) for name, tensor in trainer.weights().items())
        trainer.load_state_dict(state)
        again = [trainer.step(batch).loss for batch in batches[1:]]
        with pytest.raises(InputError, match=r"shape \[1, 16\], and the plan is for \[4, 16\]"):
            trainer.session.own_part({"input_ids": torch.zeros(1, 16, dtype=torch.int64)})
    return {
        "losses": losses, "evaluated": evaluated, "again": again, "steps": steps, "weights": list(weights),
    }  # fmt: skip


def whole(trainer: Trainer, step: int) -> Any:
    """The whole batch that the data gives for a step."""
    import torch

    session, plan = trainer.session, trainer.plan
    parts = [
        session.batches.microbatch(step, first, session.graph)
        for first in range(0, plan.job.global_batch, plan.microbatch_size)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_what_a_trainer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    llama(tmp_path / "plan.json")
    with pytest.raises(InputError, match="needs 2 processes: start the script with `stagewright launch"):
        Trainer(tmp_path / "plan.json", out=tmp_path / "run")
