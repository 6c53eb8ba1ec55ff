"""Batches of several lengths under one plan train as the plain model does, within the bytes predicted for each length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plans import trained
from typer.testing import CliRunner

from local_cluster import local
from stagewright.cli.app import app
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.metering import Metering, TimedStep
from stagewright.execution.rank_runner import BatchResult
from stagewright.execution.record import Record
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.report.runs import run_document
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import ModelReference, resolve

LENGTHS = (64, 24, 24)


def reference() -> ModelReference:
    return resolve("tiny-llama", {"num_hidden_layers": 2})


@pytest.mark.multiprocess
def test_a_run_of_several_lengths(tmp_path: Path) -> None:
    target = local(2)
    job = Job(global_batch=4, sequence_lengths=LENGTHS, dtype="fp32", num_steps=4)
    asked = {"schedules": ["1f1b"], "pp": 2, "microbatch": 1}
    found = plan(reference(), target, job, **asked).plans[0]  # type: ignore[arg-type]
    limit = max(rank.reserved_peak_bytes for rank in found.predictions.ranks) - 2**18
    limited = job.model_copy(update={"memory_limit": limit})
    found = plan(reference(), target, limited, **asked).plans[0]  # type: ignore[arg-type]
    assert any(policy != "keep" for policy in found.memory_policy)
    record = trained(found, tmp_path)
    assert record.sequence_lengths == (64, 24, 24, 64)
    assert record.losses == pytest.approx(plain_losses(found), rel=1e-5)
    for rank in record.ranks:
        predicted = {
            length: one.ranks[rank.rank].allocated_peak_bytes for length, one in found.by_length.items()
        }
        assert rank.peak_of_length == predicted
        assert rank.allocated_peak_bytes == max(predicted.values()) <= limit
        assert rank.timed_peak_bytes == predicted[64]
    like_is_compared_with_like(found, record, tmp_path)


def like_is_compared_with_like(planned: Plan, record: Record, folder: Path) -> None:
    """The longest steps with what was predicted for them, and shorter ones, where no others were run, with theirs."""
    short_ranks = tuple(
        rank.model_copy(update={"peak_of_length": {24: rank.peak_of_length[24]}}) for rank in record.ranks
    )
    short = record.model_copy(update={"sequence_lengths": (24,) * 4, "ranks": short_ranks})
    for ran, length in ((record, 64), (short, 24)):
        document = run_document(planned, ran, "record.json")
        assert document["timed_length"] == length
        assert document["predicted_step_seconds"] == planned.by_length[length].step_seconds
        for rank in document["ranks"]:
            assert rank["allocated_peak_bytes"] == rank["predicted_allocated_peak_bytes"]
        ran.save(folder / "ran.json")
        done = CliRunner().invoke(app, ["compare", f"{folder}/plan.json", f"{folder}/ran.json", "--json"])
        assert done.exit_code == 0, done.stderr
        compared = json.loads(done.stdout)
        assert compared["step_seconds"]["predicted"] == planned.by_length[length].step_seconds
        assert all(rank["allocated_peak_bytes"]["predicted"] > 0 for rank in compared["ranks"])
        assert ("no step had 64 tokens" in done.stderr) == (length == 24)
        assert "each length three times" in done.stderr


def test_times_are_kept_of_the_longest_steps() -> None:
    metering = Metering()
    for number, length in enumerate((24, 64, 24, 64, 24)):
        metering.took(TimedStep(length, BatchResult(), float(number), 0.0))
    assert metering.timed is not None and (metering.timed.length, metering.timed.began) == (64, 3.0)


def plain_losses(planned: Plan) -> list[float]:
    """The loss of every step of the whole model in one process, AdamW and clipping by torch."""
    job = planned.job
    built = build(reference(), 1, job.sequence_length, job.torch_name, seed=job.seed)
    module, batches = built.module, SyntheticBatches(built.inputs, job.seed)
    of_dims = {
        decays: [one for one in module.parameters() if (one.dim() >= 2) == decays] for decays in (True, False)
    }
    optimizer = torch.optim.AdamW(
        [
            {"params": of_dims[True], "weight_decay": job.weight_decay},
            {"params": of_dims[False], "weight_decay": 0},
        ],
        job.learning_rate,
        job.betas,
        job.eps,
    )
    losses = []
    for step in range(job.num_steps):
        graph = trace(reference(), 1, job.length_of(step), job.torch_name)
        optimizer.zero_grad()
        found = [module(**batches.microbatch(step, index, graph)) for index in range(job.global_batch)]
        loss = torch.stack(found).mean()
        loss.backward()
        assert job.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm)
        optimizer.step()
        losses.append(float(loss))
    return losses
