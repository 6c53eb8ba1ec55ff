"""Adapters: they alone are trained, with the memory that is predicted, and transformers and peft load what is written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA, Cell
from plans import make_plan
from test_matrix import check
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.execution.model_export import export
from stagewright.execution.trainer import Trainer
from stagewright.execution.weight_files import WeightFiles
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve

small = partial(make_plan, pp=1, num_microbatches=2, num_steps=2, overrides={}, sequence_length=16)
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
    "qwen2": SIZES,
    "gemma": {**SIZES, "head_dim": 8},
}  # fmt: skip
TARGETS = {"gpt2": "all-linear", "llama": "all-linear", "qwen3_moe": "all-linear"}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_peft_load_what_was_trained(kind: str, tmp_path: Path) -> None:
    """From a folder that transformers saved: the model itself comes back to the last bit, and with adapters it is the
    trained one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    published = saved(kind, tmp_path / "published")
    lora = Lora.of(4, targets=TARGETS.get(kind))
    plan = small(tmp_path / "plan.json", str(tmp_path / "published"), lora=lora)
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


def saved(kind: str, folder: Path, seed: int = 1, **sizes: object) -> Any:
    """A model as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind] | sizes))
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
        module = build(plan.model.reference(), 1, plan.job.sequence_length, plan.job.torch_name).module
        _, unexpected = module.load_state_dict(tensors, strict=False)
        assert not {name for name in unexpected if name in dict(module.named_parameters())}
    net: Any = module.net
    return net.eval(), checkpoint


def file_names(folder: Path) -> set[str]:
    """Of the tensors in a folder's files."""
    return set(WeightFiles.of(folder).where)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_as_it_was_read(kind: str, tmp_path: Path) -> None:
    """Without a step a checkpoint and what is exported of it have the logits of the folder that the run started from; after
    some, those of the trained model."""
    import torch
    from transformers import AutoModelForCausalLM

    published = saved(kind, tmp_path / "published")
    (tmp_path / "published" / "tokenizer.json").write_text("{}")
    plan = small(tmp_path / "plan.json", str(tmp_path / "published"))
    with Trainer(plan, out=tmp_path / "run", device="cpu") as trainer:
        checkpoint = trainer.save(tmp_path / "checkpoints")
    export(tmp_path / "checkpoints", tmp_path / "whole")
    tokens = torch.arange(32).view(2, 16) % 61
    for folder in (checkpoint, tmp_path / "whole"):
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(loaded(input_ids=tokens).logits, published(input_ids=tokens).logits)
    assert file_names(tmp_path / "whole") == file_names(tmp_path / "published")
    trained, after = run_alone(plan, tmp_path)
    export(after, tmp_path / "trained")
    wanted = trained(input_ids=tokens).logits
    for folder in (after, tmp_path / "trained"):
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(loaded(input_ids=tokens).logits, wanted)
    assert not torch.allclose(published(input_ids=tokens).logits, wanted, atol=1e-3)
    with pytest.raises(InputError, match="has no adapters, since its whole model was trained; leave it out"):
        export(checkpoint, tmp_path / "adapter", adapter_only=True)


def test_adapters_go_on_with_the_model_that_they_are_for(tmp_path: Path) -> None:
    """Resumed as if never stopped, beside the same weights wherever they lie; not beside others."""
    saved("llama", tmp_path / "published")
    plan = small(tmp_path / "plan.json", str(tmp_path / "published"), lora=Lora.of(4, dropout=0.2))
    options: dict[str, Any] = {
        "out": tmp_path / "run",
        "device": "cpu",
        "checkpoint": tmp_path / "checkpoints",
    }
    whole = Trainer(plan, steps=3, out=tmp_path / "whole", device="cpu").fit()
    Trainer(plan, steps=1, **options).fit()
    assert {path.name for path in (tmp_path / "checkpoints" / "step-000001").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "rank-00000.safetensors", "checkpoint.json",
        "checkpoint.json.sha256",
    }  # fmt: skip
    resumed = Trainer(plan, steps=3, resume=True, **options).fit()
    assert whole is not None and resumed is not None and resumed.losses == whole.losses[1:]

    (tmp_path / "published").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="give its new location with --base"):
        export(tmp_path / "checkpoints", tmp_path / "merged", merges=True)
    export(tmp_path / "checkpoints", tmp_path / "merged", merges=True, base=str(tmp_path / "moved"))
    with pytest.raises(InputError, match="exists already: name a new folder"):
        export(tmp_path / "checkpoints", tmp_path / "merged", merges=True)
    saved("llama", tmp_path / "published", seed=2)
    with pytest.raises(InputError, match=r"has adapters for .* other weights"):
        Trainer(plan, steps=4, resume=True, **options)
    (tmp_path / "text.txt").write_text("a" * 64)
    words = [
        "evaluate",
        tmp_path / "plan.json",
        "--data",
        tmp_path / "text.txt",
        "--checkpoint",
        tmp_path / "checkpoints",
    ]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 2 and "which has other weights" in " ".join(done.stderr.split())
    with pytest.raises(InputError, match="is another model or has other weights"):
        export(tmp_path / "checkpoints", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_adapters_of_peft_are_gone_on_with(kind: str, tmp_path: Path) -> None:
    """As they were read without a step; trained further, and resumed, as if they had been a run's from the start."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    published = saved(kind, tmp_path / "published")
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "down_proj"]
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    before = get_peft_model(published, config).eval()
    before.save_pretrained(str(tmp_path / "adapters"))
    tokens = torch.arange(32).view(2, 16) % 61
    wanted = before(input_ids=tokens).logits
    published = before.unload()  # type: ignore[operator]

    lora = Lora.stored_in(tmp_path / "adapters")
    assert (lora.rank, lora.alpha, lora.targets) == (3, 5, tuple(sorted(targets)))
    plan = small(tmp_path / "plan.json", str(tmp_path / "published"), lora=lora, num_steps=3)
    with Trainer(plan, out=tmp_path / "none", device="cpu") as trainer:
        checkpoint = trainer.save(tmp_path / "untrained")
    read, was = (
        load_file(path / "adapter_model.safetensors") for path in (checkpoint, tmp_path / "adapters")
    )
    assert read.keys() == was.keys() and all(torch.equal(read[name], was[name]) for name in was)
    again = PeftModel.from_pretrained(published, str(checkpoint)).eval()
    assert torch.equal(again(input_ids=tokens).logits, wanted)

    trained, checkpoint = run_alone(plan, tmp_path)
    published = again.unload()  # type: ignore[operator]
    after = PeftModel.from_pretrained(published, str(checkpoint)).eval()
    assert torch.equal(after(input_ids=tokens).logits, trained(input_ids=tokens).logits)
    assert not torch.allclose(after(input_ids=tokens).logits, wanted, atol=1e-3)

    options: dict[str, Any] = {"out": tmp_path / "run", "device": "cpu"}
    whole = Trainer(plan, **options).fit()
    options["checkpoint"] = tmp_path / "resumed"
    Trainer(plan, steps=1, **options).fit()
    drawn = small(
        tmp_path / "drawn.json", str(tmp_path / "published"), lora=lora.model_copy(update={"folder": None})
    )
    resumed = Trainer(drawn, steps=3, resume=True, **options).fit()
    assert whole is not None and resumed is not None and resumed.losses == whole.losses[1:]


def test_adapters_that_cannot_be_gone_on_with_are_named(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(saved("llama", tmp_path / "published"), LoraConfig(r=4)).save_pretrained(
        str(tmp_path / "adapters")
    )
    config = tmp_path / "adapters" / "adapter_config.json"
    good, file = json.loads(config.read_text()), tmp_path / "adapters" / "adapter_model.safetensors"
    for key, value in {
        "use_dora": True,
        "peft_type": "LOHA",
        "rank_pattern": {"q": 2},
        "target_modules": ".*",
    }.items():
        config.write_text(json.dumps({**good, key: value}))
        with pytest.raises(InputError, match=f"has {key} = .*, but only LoRA adapters of one rank"):
            Lora.stored_in(tmp_path / "adapters")
    config.write_text(json.dumps({**good, "r": 5}))
    plan = small(
        tmp_path / "plan.json", str(tmp_path / "published"), lora=Lora.stored_in(tmp_path / "adapters")
    )
    with pytest.raises(
        InputError, match=r"of shape \[5, 32\], and .* has one of shape \[4, 32\]: the adapters are for"
    ):
        Trainer(plan, out=tmp_path / "run", device="cpu")
    config.write_text(json.dumps({**good, "target_modules": ["q_proj"]}))
    plan = small(
        tmp_path / "plan.json", str(tmp_path / "published"), lora=Lora.stored_in(tmp_path / "adapters")
    )
    with pytest.raises(InputError, match="which the model lacks: the adapters are for another model"):
        Trainer(plan, out=tmp_path / "run", device="cpu")
    with Trainer(plan, out=tmp_path / "run", device="cpu", random_weights=True) as trainer:
        written = trainer.save(tmp_path / "checkpoints")
    beside = small(tmp_path / "plan.json", str(tmp_path / "published"), lora=Lora.stored_in(written))
    with pytest.raises(
        InputError, match=r"drawn from seed 0, and this plan's model starts from .* other weights"
    ):
        Trainer(beside, out=tmp_path / "run", device="cpu")
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(
        InputError, match=r"has 'adapter_model.bin', and only safetensors files are supported"
    ):
        Trainer(plan, out=tmp_path / "run", device="cpu")


FACTORY = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

def make(microbatch_size, sequence_length):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **sizes))
    tokens = torch.randint(0, 64, (microbatch_size, sequence_length))
    net = get_peft_model(net, LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    return net, {"input_ids": tokens, "labels": tokens}, lambda output: output.loss
"""


def test_a_factory_may_return_a_model_of_peft(tmp_path: Path) -> None:
    """In half precision peft keeps adapters in float32; they alone are trained, and written as peft loads them."""
    import torch
    from peft import PeftModel

    (tmp_path / "net.py").write_text(FACTORY)
    plan = small(tmp_path / "plan.json", f"{tmp_path / 'net.py'}:make", dtype="bf16")
    trained, checkpoint = run_alone(plan, tmp_path)
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.bfloat16, torch.float32}
    export(checkpoint, tmp_path / "adapter", adapter_only=True)
    tokens = torch.arange(32).view(2, 16) % 61
    wanted = trained(input_ids=tokens).logits
    again = PeftModel.from_pretrained(trained.unload(), str(tmp_path / "adapter")).eval()
    assert torch.equal(again(input_ids=tokens).logits, wanted)
    with pytest.raises(InputError, match="is of a factory"):
        export(checkpoint, tmp_path / "merged", merges=True)


def test_what_cannot_have_adapters_is_named() -> None:
    wrong = {
        "tiny-mixtral": ("gate_up_proj", "name linear layers of this model with --lora-targets"),
        "tiny-gemma": ("embed_tokens", "is a .*Embedding, but only linear layers can have adapters"),
        "tiny-gpt2": ("lm_head", "shares its weight with another layer"),
        "tiny-deepseek-v3": (None, "peft has no default layers for models of type 'deepseek_v3'"),
    }
    for model, (targets, message) in wrong.items():
        with pytest.raises(InputError, match=message):
            build(resolve(model).adapted(Lora.of(4, targets=targets)), 1, 8, fake=True)
    with pytest.raises(InputError, match="is a factory, whose model is trained as it returns it"):
        resolve(f"{__file__}:make").adapted(Lora.of(4))
    with pytest.raises(InputError, match="rank = 0"):
        Lora.of(0)


def test_partitions_and_bounds_know_what_is_frozen() -> None:
    """Of frozen weights there are the weights alone, of adapters all that is trained with them."""
    graph = trace(resolve("tiny-llama", dict(SMALL_LLAMA)).adapted(Lora.of(4)), 1, 16, "bfloat16")
    body = RangeCosts(graph, Costing(graph, load_cluster("8x-h100").device))
    trained = sum(
        graph.values[one].meta.num_elements for one in graph.parameter_values if one in graph.gradients
    )
    assert 0 < trained == body.trained_bytes[-1] / 18 < graph.num_parameters / 4
    assert body.state_bytes[-1] == 18 * trained + 2 * (graph.num_parameters - trained)
    assert body.parameter_bytes[-1] == 2 * graph.num_parameters
