"""Export of a plan to the JSON configuration of DeepSpeed's `initialize`, as far as that can express it.

With DeepSpeed the training script sets tensor, context and expert parallelism, and a rule cuts the stages.

Source: DeepSpeed v0.19.5, docs/_pages/config-json.md and deepspeed/runtime/config.py.
"""

from __future__ import annotations

import json
from typing import Any

from stagewright.errors import InputError
from stagewright.export.translation import Stack, Translation
from stagewright.planning.plan import Plan
from stagewright.text import one_line

STACK = Stack(
    name="deepspeed",
    runtime=None,
    schedules=("1f1b",),
    recomputes=("none", "full"),
    level=lambda level, pp: min(level, 1) if pp > 1 else level,
    parallelism=(),
    cuts_freely=False,
)
"""DeepSpeed's pipelines shard optimizer state at most. The model is the user's PyTorch model, so the plan's runtime is
kept."""


def deepspeed_files(translation: Translation) -> dict[str, str]:
    """Return `deepspeed.json`, and `README.md` with what it does not express, since JSON has no comments.

    Raises:
        InputError: DeepSpeed does not train in this precision.
    """
    document = json.dumps(_document(translation.plan), indent=1) + "\n"
    omitted = "".join(f"* {one_line(note)}\n" for note in translation.notes)
    name = one_line(translation.plan.model.name)
    readme = f"# {name} for DeepSpeed\n\nWritten by Stagewright. Not in `deepspeed.json`:\n\n{omitted}"
    return {"deepspeed.json": document} | ({"README.md": readme} if omitted else {})


def _document(plan: Plan) -> dict[str, Any]:
    job = plan.job
    document: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": job.clip_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                "betas": list(job.betas),
                "eps": job.eps,
                "weight_decay": job.weight_decay,
            },
        },
        "zero_optimization": {"stage": max(plan.sharding), "overlap_comm": True},
        **_precision(job.dtype),
    }
    if plan.reduce_dtype is not None:
        document["communication_data_type"] = plan.reduce_dtype
    recomputes = "layers" in plan.memory_policy
    if plan.pp > 1 or recomputes:
        document["pipeline"] = {
            "stages": plan.pp,
            "partition": "uniform",
            "activation_checkpoint_interval": int(recomputes),
        }
    return document


def _precision(dtype: str) -> dict[str, Any]:
    if dtype in ("bf16", "fp16"):
        return {dtype: {"enabled": True}}
    if dtype in ("fp32", "tf32"):
        return {}
    raise InputError(f"deepspeed: its configuration has no {dtype}: plan with --dtype bf16, fp16 or fp32")
