"""Runs on records: what several processes learn is what plain training learns, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from texts import small_plan, tokenizer_file, write_lines

from stagewright.errors import InputError
from stagewright.execution import launch
from stagewright.execution.data.batches import open_batches
from stagewright.execution.data.prepared import prepared
from stagewright.execution.data.request import DataRequest
from stagewright.execution.launch import run
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build

PAIRS = [
    {"prompt": f"the ship {number} ", "completion": "call me " * (1 + number % 5)} for number in range(30)
]
TEXTS = [{"text": f"some years ago, the captain and {number} men"} for number in range(30)]
STEPS = 4


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.fixture
def request_(tmp_path: Path) -> DataRequest:
    pairs, texts = write_lines(tmp_path / "pairs.jsonl", PAIRS), write_lines(tmp_path / "texts.jsonl", TEXTS)
    found = DataRequest.of([f"{pairs}=2", str(texts)], tokenizer_file(tmp_path))
    assert found is not None
    return found


@pytest.mark.multiprocess
def test_runs_on_records_equal_plain_training_and_go_on_in_mid_epoch(
    request_: DataRequest, tmp_path: Path
) -> None:
    """Two stages on two processes; then two replicas, with microbatches of another size; then with an interruption."""
    common = {"dtype": "fp64", "num_steps": STEPS}
    stages = small_plan(tmp_path / "stages", num_microbatches=4, **common)
    expected = plain_losses(stages, request_)
    found = run(tmp_path / "stages" / "plan.json", request_, out=tmp_path / "one", device="cpu", timeout=60)
    assert found is not None and found.losses == pytest.approx(expected, rel=1e-9)

    small_plan(tmp_path / "replicas", pp=1, dp=2, num_microbatches=1, microbatch_size=2, **common)
    plan, folder = tmp_path / "replicas" / "plan.json", tmp_path / "checkpoints"
    run(plan, request_, 2, tmp_path / "two", "cpu", timeout=60, checkpoint=folder)
    resumed = run(plan, request_, STEPS, tmp_path / "two", "cpu", timeout=60, checkpoint=folder, resume=True)
    assert resumed is not None and resumed.losses == pytest.approx(expected[2:], rel=1e-9)
    other = request_.model_copy(update={"sources": request_.sources[:1]})
    with pytest.raises(
        InputError, match=r"run on other data: it was 0\.667 of 'pairs\.jsonl'.*; 0\.333 of 'texts\.jsonl'"
    ):
        run(plan, other, STEPS + 1, tmp_path / "two", "cpu", checkpoint=folder, resume=True)


def plain_losses(plan: Plan, request: DataRequest) -> list[float]:
    """AdamW on the mean over all learnt tokens of each batch, in this process."""
    job, model, data = plan.job, plan.model.resolved(), prepared(request, plan)
    assert data is not None and data.further_inputs == ("labels",)
    module = build(model, 1, job.sequence_length, job.torch_name, seed=job.seed).module
    graph = trace(model, 1, further_inputs=data.further_inputs, **plan.traced())
    batches = open_batches(data, job)
    groups = [
        {"params": [one for one in module.parameters() if one.dim() >= 2], "weight_decay": job.weight_decay},
        {"params": [one for one in module.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=job.learning_rate, betas=job.betas, eps=job.eps)
    losses, masked = [], 0
    for step in range(STEPS):
        samples = [batches.microbatch(step, sample, graph) for sample in range(job.global_batch)]
        batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        masked += int((batch["labels"] == -100).sum())
        loss = module(**batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm or float("inf"))
        adamw.step()
        losses.append(float(loss.detach()))
    assert masked > 0
    return losses


def test_data_that_cannot_be_used_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start_ranks", lambda *arguments: pytest.fail("processes were started"))
    small_plan(tmp_path, "tiny-vit")
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(InputError, match="is not made of tokens: give your own dataset"):
        run(tmp_path / "plan.json", lines, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
