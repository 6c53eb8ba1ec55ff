"""Packages for `torch.distributed.pipelining` run under PyTorch's own runtime, and train as the plain model does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from multiprocess import run_ranks
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.execution.initial_weights import write_initial_weights
from stagewright.export.torch_pipelining import check_memory, not_translated, torch_package
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import whole_layers
from stagewright.planning.search import plan as search
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import ModelReference, resolve

MODELS = {
    "tiny-llama": {
        "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    },
    "tiny-gpt2": {
        "n_embd": 32, "vocab_size": 96, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
}  # fmt: skip
JOB = Job(
    global_batch=8, sequence_length=16, dtype="fp64", num_steps=6, warmup_steps=2, lr_schedule="cosine", clip_norm=0.25,
    learning_rate=1e-2, betas=(0.8, 0.9), weight_decay=0.5, final_fraction=0.1, seed=3,
)  # fmt: skip
STEPS = 3
BOUNDS = {"pp": 2, "dp": 1, "tp": 1, "cp": 1, "microbatch": 1}
SEARCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "joint": ("tiny-llama", {"pp": 4, "schedules": ("joint",)}),
    "interleaved": ("tiny-llama", {"dp": 2, "schedules": ("interleaved-1f1b",)}),
    "tied-on-one-rank": ("tiny-gpt2", {"schedules": ("zb-v",)}),
    "tied-over-ranks": ("tiny-gpt2", {"schedules": ("1f1b",)}),
    "tied-over-replicas": ("tiny-gpt2", {"dp": 2, "schedules": ("1f1b",)}),
}
"""Plans of a search, by name: it cuts inside layers."""
ESTIMATED: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "breadth-first": {"schedule": "breadth-first", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
}


def model(name: str) -> ModelReference:
    return resolve(name, MODELS[name])


def estimated(**configuration: Any) -> Plan:
    cluster = load_cluster("4x-h100", {"device.kind": "cpu"})
    return estimate(
        model("tiny-llama"), cluster, JOB, **{"pp": 2, "dp": 1, "tp": 1, "microbatch": 1, **configuration}
    )


def searched(name: str, bounds: dict[str, Any]) -> Plan:
    bounds = {**BOUNDS, **bounds}
    cluster = load_cluster(f"{bounds['pp'] * bounds['dp']}x-h100")
    plan = search(model(name), cluster, JOB, **bounds).plans[0]
    _, is_moved = whole_layers(plan, graph_of(plan))
    assert is_moved, "no cut is inside a layer"
    return plan


def write_package(plan: Plan, folder: Path) -> None:
    folder.mkdir()
    graph = trace(plan.model.reference(), plan.microbatch_size, device="cpu", **plan.traced())
    package = torch_package(plan, graph)
    write_initial_weights(plan, package.tensors, folder)
    for file, text in package.files.items():
        (folder / file).write_text(text)


@pytest.mark.multiprocess
def test_training_under_pytorchs_runtime_is_that_of_the_plain_model(tmp_path: Path) -> None:
    plans = {name: searched(*case) for name, case in SEARCHED.items()}
    plans |= {name: estimated(**configuration) for name, configuration in ESTIMATED.items()}
    for name, plan in plans.items():
        write_package(plan, tmp_path / name)
    for size in (2, 4):
        names = {name: plan.model.text for name, plan in plans.items() if plan.num_ranks == size}
        ranks = run_ranks(differences, size, str(tmp_path), names, timeout=120)
        for name, text in names.items():
            for rank in ranks:
                assert max(rank[name].values()) < 1e-9, (name, rank[name])
            assert {parameter for rank in ranks for parameter in rank[name]} == set(parameters(text))


def parameters(name: str) -> dict[str, torch.nn.Parameter]:
    module = build(model(name), 8, JOB.sequence_length, "float64", seed=JOB.seed).module
    return dict(module.named_parameters())


def differences(rank: int, num_ranks: int, folder: str, names: dict[str, str]) -> dict[str, dict[str, float]]:
    """By package and parameter, how far this rank's gradients and weights are at most from those of the plain model."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    batches = [
        torch.randint(0, 96, (8, JOB.sequence_length), generator=torch.Generator().manual_seed(step))
        for step in range(STEPS)
    ]
    plain = {text: trained(text, batches) for text in set(names.values())}
    furthest: dict[str, dict[str, float]] = {}
    for name, text in names.items():
        train = imported(f"{folder}/{name}")
        pipeline = train.Pipeline(torch.device("cpu"))
        optimizer = train.Optimizer(pipeline)
        seen = furthest.setdefault(name, {})
        for step, (tokens, expected) in enumerate(zip(batches, plain[text], strict=True)):
            pipeline.step({"input_ids": tokens.chunk(train.REPLICAS)[pipeline.replica]})
            gradients = {key: parameter.grad.clone() for key, parameter in pipeline.parameters.items()}
            optimizer.step(step)
            for key, parameter in pipeline.parameters.items():
                gradient, weight = expected[key]
                apart = max((gradients[key] - gradient).abs().max(), (parameter - weight).abs().max())
                seen[key] = max(seen.get(key, 0.0), float(apart))
    return furthest


def trained(text: str, batches: list[torch.Tensor]) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The gradient and then the weight of every parameter after each step of plain training with the job's optimizer."""
    module = build(model(text), 8, JOB.sequence_length, "float64", seed=JOB.seed).module
    decayed = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": JOB.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=JOB.learning_rate, betas=JOB.betas, eps=JOB.eps,
    )  # fmt: skip
    steps = []
    for step, tokens in enumerate(batches):
        adamw.zero_grad()
        module(input_ids=tokens).backward()
        gradients: dict[str, Any] = {
            name: parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        most = JOB.clip_norm or 0.0
        assert torch.nn.utils.clip_grad_norm_(module.parameters(), most) > most
        for group in adamw.param_groups:
            group["lr"] = JOB.rate_of(step)
        adamw.step()
        weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        steps.append({name: (gradients[name], weights[name]) for name in weights})
    return steps


def imported(folder: str) -> Any:
    """The script of a package, as a module."""
    sys.path.insert(0, folder)
    for module in ("train", "stages"):
        sys.modules.pop(module, None)
    try:
        return importlib.import_module("train")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    "rates",
    [
        {"lr_schedule": "constant", "warmup_steps": 2},
        {"lr_schedule": "linear"},
        {"lr_schedule": "wsd", "decay_steps": 3, "warmup_steps": 1},
        {"lr_schedule": "wsd", "num_steps": 40},
        {"lr_schedule": "cosine", "final_fraction": 0.2},
    ],
)
def test_the_learning_rate_is_the_plans(rates: dict[str, Any], tmp_path: Path) -> None:
    plan = estimated(schedule="gpipe")
    job = JOB.with_rates(**{"warmup_steps": 0, "final_fraction": 0.0, "num_steps": 8, **rates})
    write_package(plan.model_copy(update={"job": job}), tmp_path / "package")
    train = imported(str(tmp_path / "package"))
    assert job.num_steps == train.STEPS
    rate = [train.ADAMW["lr"] * train.rate(step) for step in range(job.num_steps)]
    assert rate == pytest.approx([job.rate_of(step) for step in range(job.num_steps)])


def test_weights_in_half_precision_have_copies_in_fp32(tmp_path: Path) -> None:
    """Steps of a thousandth of a weight's spacing in bf16 add up."""
    write_package(estimated(schedule="gpipe"), tmp_path / "package")
    train = imported(str(tmp_path / "package"))
    train.CLIP_NORM, train.ADAMW, train.WARMUP_STEPS = None, {"lr": 1e-5}, 0
    weight = torch.nn.Parameter(torch.full((2,), 1.0, dtype=torch.bfloat16))
    pipeline: Any = type("Pipeline", (), {"parameters": {"weight": weight}})
    optimizer = train.Optimizer(pipeline)
    for _step in range(600):
        weight.grad = torch.full_like(weight, 1.0)
        optimizer.step(0)
    assert (weight < 0.9961).all()


def test_a_package_that_does_not_fit_is_refused_with_the_command_that_plans_for_it() -> None:
    """Checkpoints of layers save half of the activations here, and the package has none."""
    job = JOB.model_copy(update={"global_batch": 64, "sequence_length": 512})
    cluster = load_cluster("2x-h100")
    configuration: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "microbatch": 16}
    kept, saving = (
        estimate(model("tiny-llama"), cluster, job, **configuration, recompute=how)
        for how in ("none", "full")
    )
    roomy, tight = (plan.predictions.reserved_peak_bytes for plan in (kept, saving))
    assert tight < roomy
    for limit, fits in ((roomy, True), (roomy - 1, False)):
        limited = saving.model_copy(update={"job": job.model_copy(update={"memory_limit": limit})})
        if fits:
            check_memory(limited)
            continue
        with pytest.raises(
            InputError, match=r"rank 0 lacks .*: stagewright plan tiny-llama .*--recompute none --zero 0"
        ):
            check_memory(limited)
    check_memory(
        kept.model_copy(update={"job": job.model_copy(update={"memory_limit": 1})})
    )  # goes along as it is


def test_what_the_package_lacks_is_said() -> None:
    plan = estimated(schedule="1f1b", dp=2, recompute="full", zero=1)
    sentences = list(not_translated(plan))
    assert any("recompute" in sentence for sentence in sentences)
    assert any("shard" in sentence for sentence in sentences)
    graph = trace(plan.model.reference(), 1, device="cpu", **plan.traced())
    with pytest.raises(InputError, match="tp 2"):
        torch_package(estimated(tp=2), graph)
    half = plan.model_copy(update={"job": JOB.model_copy(update={"dtype": "fp16"})})
    with pytest.raises(InputError, match=r"does not scale the loss.*--dtype bf16"):
        torch_package(half, graph)
    others = {"dtype": "tf32", "compiled": True, "optimizer": "sgd"}
    sentences = list(not_translated(plan.model_copy(update={"job": JOB.model_copy(update=others)})))
    for what in ("tf32", "compiled", "optimizer is sgd"):
        assert any(what in sentence for sentence in sentences)
