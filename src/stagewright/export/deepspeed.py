"""Export of a plan without model parallelism to the JSON configuration of DeepSpeed's `initialize`.

With DeepSpeed, pipelines and tensor, context and expert parallelism are code of the training script, not configuration.

Source: DeepSpeed v0.19.8, docs/_pages/config-json.md and deepspeed/runtime/config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stagewright.errors import InputError
from stagewright.export.translation import Stack, Translation
from stagewright.planning.plan import Plan
from stagewright.text import one_line

STACK = Stack(
    name="deepspeed",
    runtimes=(),
    schedules=(),
    recomputes=("none", "full"),
    level=lambda level, pp: level,
    parallelism=(),
    decays_all=True,
    plan_options=(
        "--pp",
        "1",
        "--tp",
        "1",
        "--cp",
        "1",
        "--ep",
        "1",
        "--recompute",
        "full",
        "--loss-pieces",
        "1",
    ),
)
"""The model is the user's PyTorch model, so the plan's runtime is kept."""


def remarks(plan: Plan) -> Iterator[str]:
    """Yield what the training script has to do in addition to the configuration."""
    job = plan.job
    if "layers" in plan.memory_policy:
        yield "every layer is recomputed: enable that in the model, as gradient_checkpointing_enable() does"
    yield f"number of steps and seed are the script's: {job.num_steps} and {job.seed} under the plan"
    if job.lr_schedule != "constant" or job.warmup_steps:
        yield f"warm-up and decay are the script's: {job.warmup_steps} steps, then {job.lr_schedule} under the plan"


def deepspeed_files(translation: Translation) -> dict[str, str]:
    """Return `deepspeed.json`, and `README.md` with what it does not say, since JSON has no comments.

    Raises:
        InputError: DeepSpeed does not train in this precision.
    """
    document = json.dumps(_document(translation.plan), indent=1) + "\n"
    omitted = "".join(f"* {one_line(note)}\n" for note in translation.notes)
    name = one_line(translation.plan.model.name)
    readme = f"# {name} for DeepSpeed\n\nWritten by Stagewright. Not in `deepspeed.json`:\n\n{omitted}"
    return {"deepspeed.json": document, "README.md": readme}


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
    return document


def _precision(dtype: str) -> dict[str, Any]:
    if dtype in ("bf16", "fp16"):
        return {dtype: {"enabled": True}}
    if dtype in ("fp32", "tf32"):
        return {}
    raise InputError(f"deepspeed: its configuration has no {dtype}: plan with --dtype bf16, fp16 or fp32")
