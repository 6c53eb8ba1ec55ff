"""`run` as a user starts it: training, several replicas, and a rank that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import make_plan

from patience import patient
from stagewright.errors import InputError, RunError
from stagewright.execution.data.batches import open_batches
from stagewright.execution.data.prepared import ready
from stagewright.execution.launch import run
from stagewright.execution.rank_process import may_be_lost_peer
from stagewright.execution.record import load_record
from stagewright.planning.plan import load_plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess

TEXT = Path(str(files("stagewright") / "data" / "moby_dick.txt"))


@pytest.mark.parametrize(("pp", "dp", "dtype"), [(2, 1, "fp64"), (1, 2, "fp64"), (2, 1, "bf16")])
def test_training_equals_plain_training(pp: int, dp: int, dtype: str, tmp_path: Path) -> None:
    """Losses over several optimizer steps are those of the same model trained in one process."""
    plan = make_plan(tmp_path / "plan.json", pp=pp, dp=dp, dtype=dtype)
    record = run(tmp_path / "plan.json", data=TEXT, out=tmp_path / "run", device="cpu", timeout=60)
    assert record is not None
    tolerance = 1e-9 if dtype == "fp64" else 2e-2
    assert record.losses == pytest.approx(_plain_losses(tmp_path / "plan.json"), rel=tolerance)
    assert record.losses[-1] < record.losses[0]
    assert len(record.ranks) == pp * dp
    for rank in record.ranks:
        assert rank.allocated_peak_bytes == max(peak for _, peak, _ in rank.memory)
        assert all(after <= peak for _, peak, after in rank.memory)
        assert [action for action, _, _ in rank.actions] == [
            at for at, _, _ in rank.memory if at[0].isdigit()
        ]
    assert {action for rank in record.ranks for action, _, _ in rank.actions} >= {
        action for actions in plan.program for action in actions
    }


def _plain_losses(path: Path) -> list[float]:
    """AdamW with clipping and fp32 master weights, on the whole model, in this process."""
    plan = load_plan(path)
    job = plan.job
    reference = resolve(plan.model.text, plan.model.overrides)
    module = build(reference, 1, job.sequence_length, job.torch_name, seed=job.seed).module
    graph = trace(reference, 1, job.sequence_length, job.torch_name)
    data = ready(TEXT, plan)
    assert data is not None
    batches = open_batches(data, job)
    wide = torch.float32 if job.dtype == "bf16" else torch.float64
    masters = [torch.nn.Parameter(parameter.detach().to(wide)) for parameter in module.parameters()]
    decayed = [master for master in masters if master.dim() >= 2 or job.decays == "all"]
    others = [master for master in masters if master.dim() < 2 and job.decays != "all"]
    groups = [
        {"params": decayed, "weight_decay": job.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=job.learning_rate, betas=job.betas, eps=job.eps
    )
    losses = []
    for step in range(job.num_steps):
        total = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for sample in range(job.global_batch):
            loss = module(**batches.microbatch(step, sample, graph))
            (loss / job.global_batch).backward()
            total += float(loss) / job.global_batch
            for master, parameter in zip(masters, module.parameters(), strict=True):
                assert master.grad is not None and parameter.grad is not None
                master.grad += parameter.grad
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, job.clip_norm or float("inf"))
        for group in adamw.param_groups:
            group["lr"] = job.rate_of(step)
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, module.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses


def test_wrong_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for two ranks under a launcher that started one says what to do."""
    make_plan(tmp_path / "plan.json")
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
         "stagewright.execution.worker", json.dumps({"plan": str(tmp_path / "plan.json"), "out": str(tmp_path / "run")})],
        capture_output=True, text=True, env={k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")},
        timeout=patient(120), check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs 2 processes" in done.stderr


def test_changed_model_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan.json")
    changed = plan.model_copy(update={"model": plan.model.model_copy(update={"digest": "0" * 64})})
    changed.save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="plan again"):
        run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu", timeout=60)


def test_an_asynchronous_plan_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stagewright.execution import launch
    from stagewright.execution.verification import verify
    from stagewright.schedule.builders import build

    program = build("pipedream", 2, 4)
    actions = tuple(tuple(map(str, actions)) for actions in program.ranks)
    plan = make_plan(tmp_path / "plan.json")
    plan = plan.model_copy(update={"schedule": program.name, "program": actions})
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(launch, "start_ranks", lambda *arguments: pytest.fail("processes were started"))
    with pytest.raises(InputError, match=r"'pipedream' updates weights in the middle of a batch.*--schedule"):
        run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu")
    with pytest.raises(InputError, match="'pipedream' updates weights"):
        verify("tiny-llama", plan)


def test_a_loss_that_is_no_number_is_in_the_record(tmp_path: Path) -> None:
    """What was measured is not lost with the training."""
    plan = make_plan(tmp_path / "plan.json", num_steps=3)
    job = plan.job.model_copy(update={"learning_rate": 1e30})
    plan.model_copy(update={"job": job}).save(tmp_path / "plan.json")
    record = run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu", timeout=60)
    assert record is not None and record.losses[0] is not None and record.losses[-1] is None
    assert "None" in repr(load_record(tmp_path / "run" / "record.json").losses)
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert tuple(json.loads(line)["loss"] for line in lines) == record.losses


def test_what_the_user_gave_is_refused_as_such(tmp_path: Path) -> None:
    """Also where only a rank can see it; folders and devices before any process is started."""
    make_plan(tmp_path / "plan.json")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="give another one with --out"):
        run(tmp_path / "plan.json", out=tmp_path / "file", device="cpu")
    with pytest.raises(InputError, match=r"nothing can be written to .* give another one with --checkpoint"):
        run(
            tmp_path / "plan.json",
            out=tmp_path / "run",
            device="cpu",
            checkpoint=tmp_path / "file" / "inside",
        )
    with pytest.raises(InputError, match="give cpu, cuda or auto"):
        run(tmp_path / "plan.json", out=tmp_path / "run", device="gpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="holds 10 tokens, fewer than one sample"):
        run(tmp_path / "plan.json", data=tmp_path / "file", out=tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.full(99, -1), "begin at 0"),
        (np.ones(99), "are integers"),
        (np.zeros(3, int), "fewer"),
        (np.full(99, 256), "--tokenizer"),
    ],
)
def test_what_are_no_token_ids_is_refused(ids: np.ndarray, match: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(InputError, match=match):
        ready(tmp_path / "ids.npy", make_plan(tmp_path / "plan.json"))


def test_a_lost_peer_is_looked_for_behind_every_error() -> None:
    lost = RunError("action 0F1 failed")
    lost.__cause__ = RuntimeError("Connection closed by peer")
    assert may_be_lost_peer(lost) and not may_be_lost_peer(InputError("no such token"))
