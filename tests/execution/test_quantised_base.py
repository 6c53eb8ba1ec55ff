"""Frozen bases of 4 and 8 bits: adapters are trained as transformers, peft and bitsandbytes train them in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import SMALL_GPT2, SMALL_LLAMA, Cell
from peft import LoraConfig, PeftModel, get_peft_model
from plans import make_plan
from safetensors import safe_open
from safetensors.torch import load_file
from test_finetuning import run_alone, saved
from test_matrix import check
from test_weight_files import assert_kept, change, quantise
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from stagewright.errors import InputError
from stagewright.execution import weight_files
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.launch import run
from stagewright.execution.model_export import export
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.quantised_base import Packed
from stagewright.tracing.models.reference import resolve

NF4 = Lora(rank=4, alpha=8, is_drawn=True, base="nf4")
INT8, FP8 = (NF4.model_copy(update={"base": base}) for base in ("int8", "fp8"))
IN_BLOCKS = (*SMALL_LLAMA, ("hidden_size", 160), ("intermediate_size", 288))
"""Several blocks of fp8, the last ones cut off."""
UNCONVERTED = "model.layers.1.self_attn.q_proj.weight"
"""Published as it is computed in, next to weights in fp8."""
PUBLISHED_IN_FP8: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", UNCONVERTED.removesuffix(".weight")],
    }
}  # fmt: skip
NUM_STEPS = 8


@pytest.mark.multiprocess
def test_adapters_of_a_quantised_base_are_trained_as_by_autograd_in_the_memory_that_is_predicted(
    tmp_path: Path,
) -> None:
    llama = {"overrides": SMALL_LLAMA, "dp": 1, "dtype": "fp32"}
    halves = {**llama, "dtype": "bf16", "num_microbatches": 4}
    check(
        [
            Cell(**llama, lora=NF4, schedule="zb-h1"),
            Cell(**llama, lora=INT8, policy="recompute"),
            Cell(**halves, lora=NF4, schedule="interleaved-1f1b", num_chunks=2),
            Cell(**llama | {"overrides": IN_BLOCKS}, lora=FP8, policy="recompute"),
            Cell(**halves, lora=FP8, schedule="zb-h1"),
            Cell(**llama, lora=NF4, policy="reruns"),
            Cell(**{**llama, "dp": 2}, lora=NF4, pp=1, sharding=3),
            Cell("tiny-gpt2", "zb-h1", dp=1, overrides=SMALL_GPT2, lora=NF4, dtype="fp32"),
        ],
        tmp_path,
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gpt2",
        "qwen3",
        "gemma3_text",
        "mixtral",
        "qwen2 in 4 bits",
        "qwen3 in fp8",
        "qwen3_moe in fp8",
    ],
)
def test_two_stages_train_as_transformers_and_peft_do(kind: str, tmp_path: Path) -> None:
    """Losses of every step, the norms of the adapters' gradients, and the adapters at the end."""
    is_fp8 = kind.endswith("fp8")
    net = reference_in_fp8(kind.split()[0], tmp_path) if is_fp8 else reference(kind, tmp_path)
    lora = Lora.stored_in(tmp_path / "adapters", base="fp8" if is_fp8 else "nf4")
    plan = make_plan(
        tmp_path / "plan.json", str(tmp_path / "published"), overrides={"dropout": 0.0}, lora=lora, num_steps=NUM_STEPS,
        sequence_length=16, microbatch_size=2, clip_norm=0.1,
    )  # fmt: skip
    record = run(
        tmp_path / "plan.json", out=tmp_path / "run", device="cpu", checkpoint=tmp_path / "checkpoints"
    )
    assert record is not None
    losses, norms = trained_plainly(net, plan)
    assert record.losses == pytest.approx(losses, rel=1e-5)
    assert record.gradient_norms == pytest.approx(norms, rel=1e-4)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    for name, tensor in net.named_parameters():
        if tensor.requires_grad:
            ours = adapters[name.replace(".default.", ".")]
            assert torch.allclose(ours, tensor, rtol=1e-5, atol=1e-5), name
            assert ours.norm() > 1e-3


def reference(kind: str, folder: Path) -> Any:
    """A small model of this kind in 4 bits with adapters, as peft loads it with bitsandbytes; published and adapters are in
    `folder`."""
    import bitsandbytes as bnb
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers import BitsAndBytesConfig

    kind, _, is_stored_in_4_bits = kind.partition(" in ")
    published = saved(kind, folder / "published")
    config = LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2",
        target_modules=["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "o_proj"],
    )  # fmt: skip
    get_peft_model(published, config).save_pretrained(str(folder / "adapters"))
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    net: Any = AutoModelForCausalLM.from_pretrained(
        folder / "published", quantization_config=quantised, device_map={"": "cpu"}, dtype=torch.float32
    )
    assert any(isinstance(module, bnb.nn.Linear4bit) for module in net.modules())
    if is_stored_in_4_bits:
        net.save_pretrained(folder / "published")
    for module in list(net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3:  # experts, which transformers leaves as they are
                replace_parameter_4bit(module, name, compress_statistics=True)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # without evaluation mode, in which bitsandbytes computes differently
    return PeftModel.from_pretrained(net, str(folder / "adapters"), is_trainable=True).train()


def reference_in_fp8(kind: str, folder: Path) -> Any:
    """A small model of this kind with adapters, as peft loads it, published in fp8. Without a GPU transformers dequantises
    it while it reads it, since its matmul in fp8 is a kernel for GPUs."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32}
    sizes |= {"moe_intermediate_size": 128} if kind.endswith("_moe") else {}
    published = saved(kind, folder / "published", **sizes)
    config = LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "o_proj"],
    )  # fmt: skip
    get_peft_model(published, config).save_pretrained(str(folder / "adapters"))
    change(folder / "published", publish_in_fp8, **PUBLISHED_IN_FP8)
    net: Any = AutoModelForCausalLM.from_pretrained(folder / "published", dtype=torch.float32)
    return PeftModel.from_pretrained(net, str(folder / "adapters"), is_trainable=True).train()


def publish_in_fp8(tensors: dict[str, torch.Tensor]) -> None:
    plain = tensors[UNCONVERTED]
    quantise(tensors, size=128)
    tensors[UNCONVERTED] = plain
    del tensors[f"{UNCONVERTED}_scale_inv"]


def trained_plainly(net: Any, plan: Plan) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradients of a plan's steps, of one process with all layers."""
    job, reference = plan.job, plan.model.reference()
    graph = trace(reference, plan.microbatch_size, **plan.traced())
    model = DeferredModel(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    batches = SyntheticBatches(model.inputs, job.seed)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(
        trained, lr=job.learning_rate, betas=job.betas, eps=job.eps, weight_decay=job.weight_decay
    )
    losses, norms = [], []
    for step in range(job.num_steps):
        total = 0.0
        for microbatch in range(plan.num_microbatches):
            tokens = batches.microbatch(step, microbatch * plan.microbatch_size, graph)["input_ids"]
            loss = net(input_ids=tokens, labels=tokens).loss / plan.num_microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, job.clip_norm or float("inf"))))
        adamw.step()
        adamw.zero_grad()
    return losses, norms


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8", "fp8 as published"])
def test_what_is_merged_is_what_was_trained(base: str, tmp_path: Path) -> None:
    """The base is in no checkpoint, and comes back as it was; with its adapters merged it is the model of the run."""
    base, _, is_published = base.partition(" as ")
    published = saved("llama", tmp_path / "published", **{"hidden_size": 256} if is_published else {})
    if is_published:
        change(tmp_path / "published", publish_in_fp8, **PUBLISHED_IN_FP8)
        published = AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32).eval()
    lora = Lora.of(4, targets="all-linear", base=base)
    plan = make_plan(
        tmp_path / "plan.json",
        str(tmp_path / "published"),
        overrides={},
        lora=lora,
        num_steps=2,
        sequence_length=16,
        pp=1,
    )
    trained, checkpoint = run_alone(plan, tmp_path)
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            assert all("lora_" in name for name in iter(file.keys()))
    export(checkpoint, tmp_path / "whole")
    export(checkpoint, tmp_path / "merged", merges=True)
    tokens = torch.arange(32).view(2, 16) % 61
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(whole(input_ids=tokens).logits, published(input_ids=tokens).logits)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    wanted = trained(input_ids=tokens).logits
    assert torch.allclose(merged(input_ids=tokens).logits, wanted, atol=1e-4 if is_published else 1e-5)
    assert not torch.allclose(whole(input_ids=tokens).logits, wanted, atol=1e-3)


def test_what_a_quantised_base_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no weight can be split over ranks: leave out --tp, or --lora-base"):
        trace(resolve("tiny-llama", {"num_hidden_layers": 1}).adapted(NF4), 1, 16, tp=2)
    with pytest.raises(InputError, match="at most 32 bits: plan with --dtype fp32 or bf16"):
        trace(resolve("tiny-llama", {"num_hidden_layers": 1}).adapted(NF4), 1, 16, "float64")
    make_plan(tmp_path / "plan.json", lora=NF4)
    monkeypatch.setattr(weight_files, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="need bitsandbytes, which is not installed: pip install"):
        run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("base", "error"), [("int8", 0.0087), ("fp8", 0.0265), ("nf4", 0.092)])
def test_int8_rounds_least_and_nf4_most(base: str, error: float) -> None:
    """Root mean square of the error, relative to that of weights drawn from a normal distribution."""
    weight = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))
    packed = Packed.of(weight, base, False)
    rounded = packed.unpack(packed.pack(weight))
    assert ((rounded - weight).square().mean() / weight.square().mean()).sqrt() == pytest.approx(
        error, rel=0.03
    )


def test_weights_are_quantised_to_fp8_as_by_transformers() -> None:
    """To the last bit, blocks of zeros too; with matrices that blocks divide, since it quantises no others."""
    weight = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[0, :128, :128] = 0.0
    config: Any = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    wanted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})  # type: ignore[arg-type]
    assert_kept(
        Packed.of(weight, "fp8", False).pack(weight), [wanted["weight"]], [wanted["weight_scale_inv"]]
    )


@pytest.mark.parametrize(("base", "bits"), [(NF4, 4.13), (INT8, 8.1), (FP8, 8.002)])
def test_parameters_are_those_that_packed_weights_stand_for(base: Lora, bits: float) -> None:
    plain, packed = (
        trace(resolve("tiny-llama", {"num_hidden_layers": 1}).adapted(lora), 1, 16)
        for lora in (NF4.model_copy(update={"base": None}), base)
    )
    assert packed.num_parameters == plain.num_parameters
    in_bytes = [
        sum(graph.values[v].meta.storage_bytes for v in graph.parameter_values) for graph in (plain, packed)
    ]
    linear = 4 * sum(
        graph.values[value].meta.num_elements
        for graph in [plain]
        for name, value in graph.parameters.items()
        if name.endswith(("_proj.weight", "base_layer.weight"))
    )
    assert in_bytes[0] - in_bytes[1] == pytest.approx(linear * (1 - bits / 32), rel=1e-3)
