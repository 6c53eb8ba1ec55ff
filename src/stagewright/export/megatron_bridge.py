"""Export of a plan to a Megatron-Bridge recipe, a Python file that builds its configuration.

Source: Megatron-Bridge v0.6.0, megatron/bridge/recipes/common.py, training/config.py, training/optim.py and the bridges of
megatron/bridge/models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stagewright.errors import InputError
from stagewright.export import megatron
from stagewright.export.megatron_layout import write_layout
from stagewright.export.megatron_model import load_balancing
from stagewright.export.quoting import comments, title
from stagewright.export.translation import Translation
from stagewright.planning.plan import Plan

_PRECISIONS = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}
_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "gemma", "gemma2", "olmoe", "nemotron",
    "gpt_oss", "glm4_moe",
)  # fmt: skip
"""Models that `AutoBridge` makes, by their model_type."""
_DROPPED = ("auto_map", "quantization_config", "torch_dtype", "dtype")
"""Keys of a config.json on how a checkpoint is stored."""


def bridge_files(translation: Translation) -> dict[str, str]:
    """Return `recipe.py`, whose `recipe()` returns a `ConfigContainer`, and which trains with it when run as a script.

    Raises:
        InputError: the model is not one of a config.json, or of a family without a bridge.
    """
    plan = translation.plan
    megatron.check_is_config(plan, "megatron-bridge")
    config = {
        key: value for key, value in (plan.model.reference().config or {}).items() if key not in _DROPPED
    }
    if config.get("model_type") not in _FAMILIES:
        raise InputError(
            f"megatron-bridge: it has no bridge for model_type '{config.get('model_type')}'; it has {', '.join(_FAMILIES)}: "
            "export to megatron, or to torch-pipelining"
        )
    settings = "\n".join(f"    cfg.{name} = {value!r}" for name, value in settings_of(translation))
    text = _RECIPE.format(
        title=comments([title(plan)]),
        notes=comments(translation.notes),
        config="\n".join(f"    {line!r}" for line in json.dumps(config, indent=1).splitlines()),
        settings=settings,
    )
    return {"recipe.py": text}


def remarks(plan: Plan) -> Iterator[str]:
    """Yield what differs from the export of the same plan to Megatron-LM."""
    yield from megatron.remarks(plan)
    if plan.num_stages > plan.pp:
        yield "transfers between interleaved stages do not overlap, as they do in Megatron-LM, unless you set comm_overlap"


def settings_of(translation: Translation) -> Iterator[tuple[str, Any]]:
    """Yield paths of fields of the configuration, with their values."""
    plan, job = translation.plan, translation.plan.job
    yield "model.tensor_model_parallel_size", plan.tp
    yield "model.sequence_parallel", plan.sequence_parallel and plan.tp > 1
    yield "model.context_parallel_size", plan.cp
    yield from _pipeline(translation)
    if plan.ep > 1:
        yield "model.expert_model_parallel_size", plan.ep
        yield "model.expert_tensor_parallel_size", 1
    yield "model.seq_length", job.sequence_length
    yield "dataset.seq_length", job.sequence_length
    if "layers" in plan.memory_policy:
        yield "model.recompute_granularity", "full"
        yield "model.recompute_method", "uniform"
        yield "model.recompute_num_layers", 1
    yield "train.micro_batch_size", plan.microbatch_size
    yield "train.global_batch_size", job.global_batch
    yield "train.train_iters", job.num_steps
    yield "mixed_precision", _PRECISIONS[job.dtype]
    yield from _replicas(plan)
    yield from (
        ("optimizer.lr", job.learning_rate),
        ("optimizer.min_lr", job.learning_rate * job.final_fraction),
    )
    yield from (("optimizer.adam_beta1", job.betas[0]), ("optimizer.adam_beta2", job.betas[1]))
    yield "optimizer.adam_eps", job.eps
    for name in ("optimizer.weight_decay", "scheduler.start_weight_decay", "scheduler.end_weight_decay"):
        yield name, job.weight_decay  # the scheduler sets it every step
    yield "optimizer.clip_grad", job.clip_norm or 0.0
    yield "rng.seed", max(job.seed, 1)
    yield "checkpoint.load", None  # a checkpoint of another run in the same folder is not gone on with
    if megatron.has_experts(plan):
        kind, coefficient = load_balancing(plan.model.reference().config or {})
        yield "model.moe_router_load_balancing_type", kind
        yield "model.moe_aux_loss_coeff", coefficient
    yield "scheduler.lr_warmup_iters", job.warmup_steps
    yield "scheduler.lr_decay_style", "WSD" if job.lr_schedule == "wsd" else job.lr_schedule
    if job.lr_schedule == "wsd":
        yield "scheduler.lr_wsd_decay_style", "linear"
        yield "scheduler.lr_wsd_decay_iters", job.decay_steps or max(1, job.num_steps // 10)


def _pipeline(translation: Translation) -> Iterator[tuple[str, Any]]:
    plan = translation.plan
    yield "model.pipeline_model_parallel_size", plan.pp
    chunks = translation.configuration.chunks or 1
    if chunks > 1:
        yield "model.virtual_pipeline_model_parallel_size", chunks
    counts = translation.configuration.layers_per_stage or ()
    if len(set(counts)) > 1:
        yield "model.pipeline_model_parallel_layout", write_layout(counts)


def _replicas(plan: Plan) -> Iterator[tuple[str, Any]]:
    shards, overlaps = bool(max(plan.sharding)), plan.dp > 1 and plan.job.profile.overlaps_reduction
    yield "ddp.use_distributed_optimizer", shards
    yield "optimizer.use_distributed_optimizer", shards
    yield "ddp.overlap_grad_reduce", overlaps
    yield "ddp.overlap_param_gather", overlaps and shards
    yield "ddp.grad_reduce_in_fp32", not megatron.reduces_in_bf16(plan)
    if plan.shard_size is not None:
        yield "ddp.num_distributed_optimizer_instances", plan.num_holders // plan.shard_size


_RECIPE = '''\
{title}
"""torchrun ... recipe.py trains it on random tokens; `recipe()` is the configuration, to which data and tokenizer are added.
"""

import json

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import AutoConfig

{notes}
MODEL = json.loads(
{config}
)


def recipe() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_config(AutoConfig.for_model(**MODEL)).to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.vocab_size = MODEL["vocab_size"]
{settings}
    return cfg


if __name__ == "__main__":
    pretrain(recipe(), forward_step)
'''
