"""Export of a plan to the TOML of torchtitan's `train.py`, and to a schedule file if its schedule has no name there.

Source: torchtitan v0.2.2, torchtitan/config/job_config.py, torchtitan/distributed/pipeline_parallel.py and the flavors of
torchtitan/models. Ignores: later versions, whose configurations are Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from stagewright.documents import parse_toml
from stagewright.errors import InputError
from stagewright.export.quoting import comments, quoted
from stagewright.export.translation import Stack, Translation
from stagewright.planning.plan import Plan
from stagewright.schedule.torch_csv import write_torch_csv
from stagewright.tracing.models.reference import bundled_names, resolve

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "breadth-first": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
"""PyTorch's names of our schedules."""

ANY_ORDER = "PipelineScheduleMulti"
"""PyTorch's schedule that takes the order of forwards and backwards from a file."""

RUNTIME = "torch-fsdp"


def _level(level: int, pp: int) -> int:
    """Return the ZeRO level torchtitan runs: pipelines keep parameters gathered and reduce after the last microbatch."""
    if level == 0:
        return 0
    return 1 if pp > 1 else max(level, 2)


STACK = Stack(
    name="torchtitan",
    runtime=RUNTIME,
    schedules=tuple(SCHEDULES),
    recomputes=("none", "full", "selective"),
    level=_level,
    reads_orders=True,
    shards_in_groups=True,
    splits_sequence=True,
    reduces_in_half=False,
    compiles=True,
)

_FLAVORS = {
    ("llama", 128256, 4096, 32): ("llama3", "8B"), ("llama", 128256, 8192, 80): ("llama3", "70B"),
    ("llama", 128256, 16384, 126): ("llama3", "405B"), ("qwen3", 151936, 1024, 28): ("qwen3", "0.6B"),
    ("qwen3", 151936, 2048, 28): ("qwen3", "1.7B"), ("qwen3", 151936, 2560, 36): ("qwen3", "4B"),
    ("qwen3", 151936, 4096, 36): ("qwen3", "8B"), ("qwen3", 151936, 5120, 40): ("qwen3", "14B"),
    ("qwen3", 151936, 5120, 64): ("qwen3", "32B"), ("qwen3_moe", 151936, 2048, 48): ("qwen3", "30B-A3B"),
    ("qwen3_moe", 151936, 4096, 94): ("qwen3", "235B-A22B"), ("deepseek_v3", 129280, 7168, 61): ("deepseek_v3", "671B"),
}  # fmt: skip
"""Names of models by family, vocabulary, hidden size and number of layers."""
_FOLDERS = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3", "deepseek_v3": "deepseek_v3"}


@cache
def known_keys() -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of the configuration and the types of their keys."""
    file = resources.files("stagewright.export") / "formats" / "torchtitan.toml"
    return parse_toml(file.read_text(encoding="utf-8"), "torchtitan.toml")["keys"]


def torchtitan_files(translation: Translation) -> dict[str, str]:
    """Return `train.toml`, and `schedule.csv` if the schedule has no name there.

    Raises:
        InputError: torchtitan has no model of this family, or does not train in this precision.
    """
    plan = translation.plan
    name, flavor = _model(plan)
    model: dict[str, Any] = {"name": name, "flavor": flavor}
    if plan.job.dtype == "fp8":
        model["converters"] = ["quantize.linear.float8"]
    sections = {
        "job": {"description": f"{plan.model.name}, {plan.schedule}: written by Stagewright"},
        "model": model,
        "optimizer": _optimizer(plan),
        "lr_scheduler": _learning_rate(plan),
        "training": _training(plan),
        "parallelism": _parallelism(translation),
        "activation_checkpoint": _recomputation(plan),
        "compile": {"enable": plan.job.compiled, "components": ["model", "loss"]},
    }
    how = "For torchtitan v0.2.2: torchrun ... -m torchtitan.train --job.config_file train.toml"
    body = [
        f"\n[{section}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in keys.items())
        for section, keys in sections.items()
    ]
    files = {"train.toml": comments([how, *translation.notes]) + "\n" + "".join(body)}
    if translation.configuration.program is not None:
        files["schedule.csv"] = write_torch_csv(translation.configuration.program)
    return files


def _value(value: Any) -> str:
    """Return a value as TOML, with nested lists on a line each.

    >>> _value(3e-4), _value(["a"]), _value(True)
    ('0.0003', '["a"]', 'true')
    """
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {_value(item)},\n" for item in value) + "]"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def remarks(plan: Plan) -> Iterator[str]:
    """Yield what the user has to do in addition to the files."""
    folder, flavor = _model(plan)
    if flavor not in {own_flavor for _, own_flavor in _FLAVORS.values()}:
        yield f"flavor {flavor} has to be added to torchtitan/models/{folder}/__init__.py, which has none of these sizes"


def _model(plan: Plan) -> tuple[str, str]:
    """Return name and flavor; raises `InputError` if there is no such model."""
    config = {} if plan.model.is_code else plan.model.reference().config or {}
    family = str(config.get("model_type", plan.model.text))
    if plan.model.lora is not None or family not in _FOLDERS:
        what = "adapters" if plan.model.lora else f"'{family}' models"
        raise InputError(
            f"torchtitan: it trains no {what} known here; known are {', '.join(_FOLDERS)}: export to "
            "torch-pipelining, or train with `stagewright run`"
        )
    own_flavor = f"{plan.model.name}-changed" if plan.model.overrides else plan.model.name
    return _FLAVORS.get(_sizes(config), (_FOLDERS[family], own_flavor))


def model_text(name: str, flavor: str) -> str | None:
    """Return the bundled model that is a torchtitan model; None if none is."""
    sizes = {key for key, model in _FLAVORS.items() if model == (name, flavor)}
    folders = {family for family, folder in _FOLDERS.items() if folder == name}
    for text in bundled_names():
        config = resolve(text).config or {}
        if config["model_type"] in folders and (flavor == text or _sizes(config) in sizes):
            return text
    return None


def _sizes(config: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """Return what distinguishes models."""
    return config["model_type"], config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]


def _optimizer(plan: Plan) -> dict[str, Any]:
    job = plan.job
    betas = {"beta1": job.betas[0], "beta2": job.betas[1]}
    return {
        "name": "AdamW",
        "lr": job.learning_rate,
        **betas,
        "eps": job.eps,
        "weight_decay": job.weight_decay,
    }


def _learning_rate(plan: Plan) -> dict[str, Any]:
    job = plan.job
    keys: dict[str, Any] = {"warmup_steps": job.warmup_steps, "min_lr_factor": job.final_fraction}
    if job.lr_schedule == "constant":
        return keys | {"decay_ratio": 0.0}
    if job.lr_schedule == "wsd":
        return keys | {"decay_ratio": (job.decay_steps or max(1, job.num_steps // 10)) / job.num_steps}
    return keys | {"decay_type": job.lr_schedule}


_PRECISIONS = {
    "bf16": "bfloat16",
    "autocast": "bfloat16",
    "fp8": "bfloat16",
    "fp32": "float32",
    "tf32": "float32",
}


def _training(plan: Plan) -> dict[str, Any]:
    job = plan.job
    if job.dtype not in _PRECISIONS:
        raise InputError(f"torchtitan: it does not train in {job.dtype}: plan with --dtype bf16 or fp32")
    of_pipeline = plan.num_microbatches if plan.pp > 1 else 1
    return {
        "local_batch_size": plan.microbatch_size * of_pipeline, "global_batch_size": job.global_batch,
        "seq_len": job.sequence_length, "max_norm": job.clip_norm or 1e30, "steps": job.num_steps, "dtype": "float32",
        "mixed_precision_param": _PRECISIONS[job.dtype],
    }  # fmt: skip


def _parallelism(translation: Translation) -> dict[str, Any]:
    plan = translation.plan
    shards = 1 if not max(plan.sharding) else (plan.shard_size or plan.num_holders) // plan.cp
    if not shards:
        raise InputError(
            f"torchtitan: it shards over all {plan.cp} ranks of cp, more than the plan's groups of {plan.shard_size}: plan "
            "without --shard-size"
        )
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // shards, "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if max(plan.sharding) == 3 else "never",
        "tensor_parallel_degree": plan.tp, "context_parallel_degree": plan.cp, "pipeline_parallel_degree": plan.pp,
    }  # fmt: skip
    if plan.ep > 1:
        keys |= {"expert_parallel_degree": plan.ep, "expert_tensor_parallel_degree": 1}
    if plan.pp == 1:
        return keys
    order = translation.configuration.program
    keys["pipeline_parallel_schedule"] = ANY_ORDER if order else SCHEDULES[plan.schedule]
    if order:
        keys["pipeline_parallel_schedule_csv"] = "schedule.csv"
    keys["pipeline_parallel_microbatch_size"] = plan.microbatch_size
    keys["module_fqns_per_model_part"] = module_names(translation.configuration.layers_per_stage or ())
    return keys


def module_names(counts: Sequence[int]) -> list[list[str]]:
    """Return the modules of stages of the given numbers of layers.

    >>> module_names((1, 0))
    [['tok_embeddings', 'layers.0'], ['norm', 'output']]
    """
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    stages = [
        [f"layers.{start + layer}" for layer in range(count)]
        for start, count in zip(starts, counts, strict=True)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _recomputation(plan: Plan) -> dict[str, Any]:
    policies = set(map(str, plan.memory_policy))
    if "selective" in policies:
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": "full" if "layers" in policies else "none"}
