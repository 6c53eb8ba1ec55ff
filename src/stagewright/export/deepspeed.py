"""A plan as the JSON of DeepSpeed's `initialize`, as far as that has words.

Tensor, context and expert parallelism are a matter of the training script there, and stages are cut by a rule.

Source: DeepSpeed v0.19.5, docs/_pages/config-json.md and deepspeed/runtime/config.py.
"""

from __future__ import annotations

import json
from typing import Any

from stagewright.errors import InputError
from stagewright.export.expressed import Expressed, Stack
from stagewright.planning.plan import Plan
from stagewright.text import one_line

STACK = Stack(
    name="deepspeed",
    runtime=None,
    schedules=("1f1b",),
    recomputes=("none", "full"),
    level=lambda level, pp: min(level, 1) if pp > 1 else level,
    widths=(),
    cuts_freely=False,
)
"""Its pipelines shard optimizer state at most. The model is the user's, in PyTorch, so the runtime is the plan's."""


def deepspeed_files(found: Expressed) -> dict[str, str]:
    """`deepspeed.json`; JSON has no comments, so what is not in it is in `README.md`.

    Raises:
        InputError: it does not train in the precision.
    """
    document = json.dumps(_document(found.plan), indent=1) + "\n"
    left = "".join(f"* {one_line(note)}\n" for note in found.notes)
    name = one_line(found.plan.model.name)
    readme = f"# {name} for DeepSpeed\n\nWritten by Stagewright. Not in `deepspeed.json`:\n\n{left}"
    return {"deepspeed.json": document} | ({"README.md": readme} if left else {})


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
    raise InputError(
        f"deepspeed: its configuration does not say {dtype}: plan with --dtype bf16, fp16 or fp32"
    )
