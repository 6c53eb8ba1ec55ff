"""Evaluation through the pipeline equals the plain model in evaluation mode, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_plan

from multiprocess import run_ranks
from stagewright.execution.data import SyntheticBatches
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess

NORMALISED = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3),
                        nn.Linear(16, 4), nn.BatchNorm1d(4))
    return net, (torch.randn(6, 8),), lambda out: (out - 1).square().mean()
"""


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.mark.parametrize("model", ["tiny-gpt2", "normalised"])
def test_evaluation_equals_the_plain_model(model: str, tmp_path: Path) -> None:
    """Before and after training: with dropout in the model, and with statistics that training changes."""
    if model == "normalised":
        (tmp_path / "normalised.py").write_text(NORMALISED)
        text, overrides, size = f"{tmp_path / 'normalised.py'}:make", {}, 6
    else:
        text, overrides, size = model, {"num_hidden_layers": 2}, 1
    path = tmp_path / "plan.json"
    plan = make_plan(path, text, "interleaved-1f1b", dtype="fp64", overrides=overrides, microbatch_size=size)
    ranks = run_ranks(train_and_evaluate, 2, str(path), timeout=60)
    for (before, after, again), _, _ in ranks:
        assert before == pytest.approx(plain_loss(plan, {}), rel=1e-12)
        state = {name: tensor for _, tensors, _ in ranks for name, tensor in tensors.items()}
        assert after == again == pytest.approx(plain_loss(plan, state), rel=1e-12)
        assert before != after
    assert all(held == 0 for _, _, held in ranks)


def train_and_evaluate(rank: int, num_ranks: int, path: str) -> tuple[Any, Any, int]:
    """Losses of evaluations around two training steps, the tensors after them, and what evaluation still holds."""
    import torch.distributed as dist

    from stagewright.execution.session import Session
    from stagewright.planning.plan import load_plan

    dist.init_process_group("gloo")
    session = Session(load_plan(path), torch.device("cpu"))
    before = session.evaluate(7)
    for step in range(2):
        session.train_step(step)
    weights = session.weights
    tensors = {weights.names[value]: tensor.clone() for value, tensor in weights.tensors.items()}
    after, again = session.evaluate(7), session.evaluate(7)
    unchanged = all(
        torch.equal(tensors[weights.names[value]], tensor) for value, tensor in weights.tensors.items()
    )
    assert unchanged, "evaluation changed a parameter or a buffer"
    evaluator = session._evaluator
    assert evaluator is not None and not evaluator.weights.gradients
    held = sum(len(values) for runner in evaluator.runners.values() for values in runner._held.values())
    dist.barrier()
    dist.destroy_process_group()
    return (before, after, again), tensors, held


def plain_loss(plan: Plan, state: dict[str, torch.Tensor]) -> float:
    """The mean loss of step 7 by the whole model in evaluation mode, with the tensors of `state` in place."""
    job, size = plan.job, plan.microbatch_size
    reference = resolve(plan.model.text, plan.model.overrides)
    built = build(reference, size, job.sequence_length, job.torch_name, seed=job.seed)
    module = built.module.eval()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph = trace(reference, size, job.sequence_length, job.torch_name)
    batches = SyntheticBatches(built.inputs, job.seed)
    with torch.no_grad():
        for name, tensor in state.items():
            if name in named:
                named[name].copy_(tensor)
        losses = [
            module(**batches.microbatch(7, index * size, graph)) for index in range(plan.num_microbatches)
        ]
    return float(torch.stack(losses).mean())
