"""Adapters: they alone are trained, with the memory that is predicted, and transformers and peft load what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA, Cell
from plans import make_plan
from test_matrix import check

from stagewright.execution.model_export import export
from stagewright.execution.trainer import Trainer
from stagewright.execution.weight_files import WeightFiles
from stagewright.planning.plan import Plan
from stagewright.tracing.models.build import build
from stagewright.tracing.models.lora import Lora

DRAWN = Lora(rank=4, alpha=8, is_drawn=True)
"""B is not zero, so that the gradients of A are none either."""


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.mark.multiprocess
def test_adapters_are_trained_as_by_autograd_in_the_memory_that_is_predicted(tmp_path: Path) -> None:
    """Of all layers or of the last alone, behind stages that train nothing."""
    last = DRAWN.model_copy(update={"targets": ("3.mlp.down_proj", "3.self_attn.q_proj")})
    first = DRAWN.model_copy(update={"targets": ("0.mlp.down_proj", "0.self_attn.q_proj")})
    llama = {"overrides": SMALL_LLAMA, "lora": DRAWN}
    check(
        [
            Cell(**llama, dp=1, schedule="zb-h1"),
            Cell(**llama, dp=1, schedule="1f1b", policy="recompute"),
            Cell(**llama, dp=1, schedule="interleaved-1f1b", num_chunks=2, num_microbatches=4, dtype="bf16"),
            Cell(**llama, pp=1, schedule="breadth-first", num_chunks=2, sharding=3),
            Cell(**llama, pp=1, sharding=1),
            Cell("tiny-gpt2", "zb-h1", dp=1, overrides=SMALL_GPT2, lora=DRAWN),
            Cell(overrides=SMALL_LLAMA, lora=last, dp=1, schedule="zb-h1"),
            Cell(overrides=SMALL_LLAMA, lora=first, dp=1, schedule="zb-h1"),
            Cell(overrides=SMALL_LLAMA, lora=last, dp=1, schedule="1f1b", policy="recompute"),
        ],
        tmp_path,
    )


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    "llama": SIZES,
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
    },
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 16},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3": {**SIZES, "head_dim": 8},
}  # fmt: skip
TARGETS = {"gpt2": "all-linear", "llama": "all-linear"}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_peft_load_what_was_trained(kind: str, tmp_path: Path) -> None:
    """From a folder that transformers saved: the model itself comes back to the last bit, and with adapters it is the
    trained one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    published = saved(kind, tmp_path / "published")
    lora = Lora.of(4, targets=TARGETS.get(kind))
    plan = make_plan(
        tmp_path / "plan.json", str(tmp_path / "published"), pp=1, num_microbatches=2, num_steps=2, overrides={},
        sequence_length=16, lora=lora,
    )  # fmt: skip
    trained, checkpoint = run_alone(plan, tmp_path)
    assert {name for name in checkpoint.iterdir() if name.name.startswith("model")} == set()
    export(checkpoint, tmp_path / "whole")
    export(checkpoint, tmp_path / "merged", merges=True)
    export(checkpoint, tmp_path / "adapter", adapter_only=True)

    tokens = torch.arange(32).view(2, 16) % 61
    wanted = trained(input_ids=tokens).logits
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(base(input_ids=tokens).logits, published(input_ids=tokens).logits)
    assert file_names(tmp_path / "whole") == file_names(tmp_path / "published")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=tokens).logits, wanted, atol=1e-5)
    assert not torch.allclose(base(input_ids=tokens).logits, wanted, atol=1e-3)
    for folder in (tmp_path / "adapter", tmp_path / "whole" / "adapter", checkpoint):
        with_adapters = PeftModel.from_pretrained(published, str(folder)).eval()
        assert torch.equal(with_adapters(input_ids=tokens).logits, wanted)
        published = with_adapters.unload()  # type: ignore[operator]


def saved(kind: str, folder: Path) -> Any:
    """A model as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def run_alone(plan: Plan, folder: Path) -> tuple[Any, Path]:
    """The trained net in plain torch, and the checkpoint."""
    with Trainer(plan, out=folder / "run", device="cpu") as trainer:
        for _ in range(plan.job.num_steps):
            trainer.step()
        checkpoint = trainer.save(folder / "checkpoints")
        weights = trainer.session.weights
        tensors = {weights.names[value]: tensor for value, tensor in weights.tensors.items()}
        module = build(plan.model.reference(), 1, plan.job.sequence_length).module
        _, unexpected = module.load_state_dict(tensors, strict=False)
        assert not {name for name in unexpected if name in dict(module.named_parameters())}
    net: Any = module.net
    return net.eval(), checkpoint


def file_names(folder: Path) -> set[str]:
    """Of the tensors in a folder's files."""
    return set(WeightFiles.of(folder).where)
