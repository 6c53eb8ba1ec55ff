"""`stagewright finetune`: what it trains is what transformers and peft train, however often it is killed and started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_finetuning import KINDS

from faults import processes_of
from patience import Deadline, patient
from stagewright.cluster import load_cluster, save_cluster
from stagewright.execution.data.order import SampleOrder
from stagewright.execution.data.samples import Packs
from stagewright.execution.data.store import open_store
from stagewright.planning.job import Job
from stagewright.planning.plan import load_plan

pytestmark = pytest.mark.multiprocess

LENGTH, BATCH, STEPS = 64, 4, 50
SIZES = {"vocab_size": 260}
WITHOUT_DROPOUT = {"gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
TRAINED = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}
RATE = 1e-2


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


def written(folder: Path, kind: str) -> Any:
    """A model of `kind` with its weights, adapters of peft that are not zero, and data, in `folder`; the adapted model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {**KINDS[kind], **SIZES, **WITHOUT_DROPOUT.get(kind, {})}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder / "model")
    targets = list(TRAINED.get(kind, ("q_proj", "v_proj")))
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, lora)
    adapted.save_pretrained(str(folder / "start"))
    words = ("sun", "moon", "star", "sea", "hill", "tree")
    lines = [
        {"prompt": f"{words[n % 6]} {n}?", "completion": f" {words[n * 5 % 6]} " * (1 + n % 3)}
        for n in range(60)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cluster = load_cluster("2x-rtx3090", {"device.kind": "cpu"})
    save_cluster(cluster, folder / "two.toml", "two processes")
    return adapted


def finetune(folder: Path, *more: object) -> list[str]:
    words = [
        "finetune",
        "model",
        "--data",
        "data.jsonl",
        "--cluster",
        "two.toml",
        "--lora-from",
        "start",
        "--pp",
        "2",
    ]
    words += [
        "--sequence-length",
        LENGTH,
        "--global-batch",
        BATCH,
        "--learning-rate",
        RATE,
        "--device",
        "cpu",
    ]
    words += ["--out", "out", *more]
    return [sys.executable, "-m", "stagewright.cli", *map(str, words)]


def run(folder: Path, *more: object) -> dict[str, Any]:
    done = subprocess.run(
        finetune(folder, *more, "--json"), cwd=folder, capture_output=True, text=True, check=False, timeout=patient(220)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def losses_of_peft(adapted: Any, folder: Path, job: Job) -> list[float]:
    """Of training in one process, every document alone, the loss over all tokens of a batch."""
    import torch

    packs = Packs(open_store(folder / "out" / "data" / "train"), LENGTH, job.seed)
    order = SampleOrder([packs.size], [1.0], job.seed)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=job.betas, eps=job.eps, weight_decay=0.0)
    adapted.train()
    losses = []
    for step in range(job.num_steps):
        total, count = torch.zeros(()), 0
        for number in range(BATCH):
            sample = packs[order[step * BATCH + number][1]]
            starts = [place for place in range(LENGTH) if sample.positions[place] == 0]
            for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
                ids = torch.from_numpy(sample.ids[start:end])[None]
                labels = torch.from_numpy(sample.learnt[start:end])[None].logical_not()
                wanted = ids.masked_fill(labels, -100)[:, 1:]
                if (wanted == -100).all():
                    continue
                logits = adapted(input_ids=ids).logits[:, :-1].float()
                total = total + torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
                )
                count += int((wanted != -100).sum())
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = job.rate_of(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "gpt2", "mixtral", "gemma3_text"])
def test_losses_and_adapters_are_those_of_peft_in_the_memory_that_is_predicted(
    kind: str, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = written(tmp_path, kind)
    document = run(tmp_path, "--steps", STEPS, "--merge")
    plan = load_plan(tmp_path / "out" / "plan.json")
    wanted = losses_of_peft(adapted, tmp_path, plan.job)
    assert len(wanted) == STEPS and wanted[-1] < wanted[0] - 0.1
    assert document["losses"] == pytest.approx(wanted, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "out" / "run" / "steps.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert held_out == {0: document["held_out_loss_before"], STEPS: document["held_out_loss"]}
    assert held_out[STEPS] < held_out[0] - 0.1

    tokens = torch.arange(32).view(2, 16) % 61
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded: Any = PeftModel.from_pretrained(base, str(tmp_path / document["adapter"])).eval()
    logits = loaded(input_ids=tokens).logits
    assert torch.allclose(adapted.eval()(input_ids=tokens).logits, logits, atol=1e-3)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / document["merged"]).eval()
    assert torch.allclose(merged(input_ids=tokens).logits, logits, atol=1e-5)

    record = json.loads((tmp_path / "out" / "run" / "record.json").read_text())
    for rank, predicted in zip(record["ranks"], plan.predictions.ranks, strict=True):
        assert rank["allocated_peak_bytes"] == pytest.approx(predicted.tensor_peak_bytes, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("step", [2, 1, 3, 5, 7])
def test_killed_and_started_again_it_ends_with_the_same_adapters(step: int, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, "llama")
    more = ("--steps", 8, "--checkpoint-every", 1)
    run(tmp_path / "whole", *more)
    folder = tmp_path / "killed"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            finetune(folder, *more),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "FAULTS_RUN": str(folder)},
        )
    deadline = Deadline(120)
    while f"step {step}/8" not in (folder / "log").read_text():
        assert process.poll() is None and deadline, (folder / "log").read_text()
        time.sleep(0.01)
    while running := processes_of(str(folder)):  # ranks too, which outlive their launcher for some steps
        assert deadline
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
    checkpoints = {file.name for file in (folder / "out" / "checkpoints").glob("step-*")}
    commands = run(folder, *more)["commands"]
    is_resumed = any(command.endswith("--resume") for command in commands)
    assert is_resumed == (bool(checkpoints) and "step-000008" not in checkpoints)
    adapters = [
        tmp_path / name / "out" / "adapter" / "adapter_model.safetensors" for name in ("whole", "killed")
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert run(folder, *more)["commands"] == []
