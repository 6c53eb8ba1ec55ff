"""Export of a plan to torchtitan's configuration, and to a schedule file if its schedule has no name there.

torchtitan 0.3 is configured by a Python function that returns a `Trainer.Config`; 0.2 was by a TOML.

Source: torchtitan v0.3.0, torchtitan/trainer.py, config/configs.py and distributed/pipeline_parallel.py, and v0.2.2,
torchtitan/config/job_config.py; the flavors of torchtitan/models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from stagewright.documents import parse_toml
from stagewright.errors import InputError
from stagewright.export.megatron import has_experts
from stagewright.export.quoting import comments, quoted, title
from stagewright.export.translation import Stack, Translation
from stagewright.planning.plan import Plan
from stagewright.schedule.torch_csv import write_torch_csv
from stagewright.text import one_line
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
    runtimes=(RUNTIME,),
    schedules=tuple(SCHEDULES),
    recomputes=("none", "full", "selective"),
    level=_level,
    reads_orders=True,
    shards_in_groups=True,
    reduces_in_half=False,
    compiles=True,
    decays_all=True,
)
STACK_OF_TOML = replace(STACK, name="torchtitan-0.2", splits_sequence=True)

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
    """Return `train_config.py` for torchtitan 0.3, and `schedule.csv` if the schedule has no name there.

    Raises:
        InputError: torchtitan has no model of this family, or does not train in this precision.
    """
    plan = translation.plan
    folder, flavor = _model(plan)
    parallelism = _parallelism(translation, head="lm_head")
    if plan.tp > 1:
        parallelism["enable_sequence_parallel"] = plan.sequence_parallel
    sections = {
        "optimizer": ("default_adamw", _optimizer(plan)),
        "lr_scheduler": ("LRSchedulersContainer.Config", _learning_rate(plan)),
        "training": ("TrainingConfig", {**_training(plan), "disable_cuda_graphs": True}),
        "parallelism": ("ParallelismConfig", parallelism),
        "compile": ("CompileConfig", {"enable": plan.job.compiled}),
        "debug": ("DebugConfig", {"seed": plan.job.seed}),
    }
    settings = "".join(f"        {name}={_call(*section)},\n" for name, section in sections.items())
    if translation.configuration.program is not None:
        settings = settings.replace(repr(SCHEDULE_FILE), f'str(Path(__file__).with_name("{SCHEDULE_FILE}"))')
    is_eight = plan.job.dtype == "fp8"
    text = _PYTHON.format(
        title=comments([title(plan), *translation.notes]),
        folder=folder,
        flavor=repr(one_line(flavor)),
        assets=repr(f"./assets/hf/{one_line(plan.model.name)}"),
        converters=", converters=[Float8LinearConverter.Config()]" if is_eight else "",
        recomputation=_POLICIES[_recomputation(plan)],
        settings=settings.rstrip(),
    )
    return {"train_config.py": text} | _schedule_file(translation)


SCHEDULE_FILE = "schedule.csv"

_POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}

_PYTHON = """\
{title}
# For torchtitan 0.3.0 (pip install torchtitan==0.3.0), on every node, with this file's folder in PYTHONPATH:
# torchrun ... -m torchtitan.train --module train_config --config train
from pathlib import Path

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{folder} import model_registry
from torchtitan.trainer import Trainer

ASSETS = {assets}  # yours: the folder of the tokenizer
DATASET = "c4"  # yours: one of torchtitan/hf_datasets/text_datasets.py


def train() -> Trainer.Config:
    model_spec = model_registry({flavor}{converters})
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=ASSETS,
        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        activation_checkpoint={recomputation},
{settings}
    )
"""


def _call(function: str, arguments: Mapping[str, Any]) -> str:
    """Return the call of a function as code, an argument a line."""
    return (
        f"{function}(\n"
        + "".join(f"            {name}={value!r},\n" for name, value in arguments.items())
        + "        )"
    )


def toml_files(translation: Translation) -> dict[str, str]:
    """Return `train.toml` for torchtitan 0.2, and `schedule.csv` if the schedule has no name there.

    Raises:
        InputError: as `torchtitan_files`; or the model has no pipelines in that version.
    """
    plan = translation.plan
    name, flavor = _model(plan)
    if name == "qwen3" and plan.pp > 1:
        raise InputError(
            "torchtitan-0.2: it has no pipelines of Qwen3: plan with --pp 1, or export to torchtitan, whose version 0.3 has"
        )
    optimizer = _optimizer(plan)
    beta1, beta2 = optimizer.pop("betas")
    model: dict[str, Any] = {
        "name": name,
        "flavor": flavor,
        "hf_assets_path": f"./assets/hf/{plan.model.name}",
    }
    if plan.job.dtype == "fp8":
        model["converters"] = ["quantize.linear.float8"]
    parallelism = _parallelism(translation, head="output")
    if plan.ep > 1:
        parallelism["expert_tensor_parallel_degree"] = 1
    mode = _recomputation(plan)
    sections = {
        "job": {"description": f"{plan.model.name}, {plan.schedule}: written by Stagewright"},
        "model": model,
        "optimizer": {"name": "AdamW", "beta1": beta1, "beta2": beta2, **optimizer},
        "lr_scheduler": _learning_rate(plan),
        "training": {"dataset": "c4", **_training(plan)},
        "parallelism": parallelism,
        "activation_checkpoint": {
            "mode": mode,
            **({"selective_ac_option": "op"} if mode == "selective" else {}),
        },
        "compile": {"enable": plan.job.compiled, "components": ["model", "loss"]},
        "debug": {"seed": plan.job.seed},
    }
    how = (
        "For torchtitan 0.2.2 (pip install torchtitan==0.2.2), with your tokenizer in hf_assets_path and your data set: "
        "torchrun ... -m torchtitan.train --job.config_file train.toml"
    )
    body = [
        f"\n[{section}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in keys.items())
        for section, keys in sections.items()
    ]
    return {"train.toml": comments([how, *translation.notes]) + "\n" + "".join(body)} | _schedule_file(
        translation
    )


def _schedule_file(translation: Translation) -> dict[str, str]:
    program = translation.configuration.program
    return {} if program is None else {SCHEDULE_FILE: write_torch_csv(program)}


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
    if has_experts(plan):
        yield "experts are balanced by a bias of the router, as torchtitan does, and under the plan as the model's code does"


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
    return {
        "lr": job.learning_rate,
        "betas": job.betas,
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


def _parallelism(translation: Translation, head: str) -> dict[str, Any]:
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
        keys["expert_parallel_degree"] = plan.ep
    if plan.pp == 1:
        return keys
    order = translation.configuration.program
    keys["pipeline_parallel_schedule"] = ANY_ORDER if order else SCHEDULES[plan.schedule]
    if order:
        keys["pipeline_parallel_schedule_csv"] = SCHEDULE_FILE
    keys["pipeline_parallel_microbatch_size"] = plan.microbatch_size
    keys["module_fqns_per_model_part"] = module_names(translation.configuration.layers_per_stage or (), head)
    return keys


def module_names(counts: Sequence[int], head: str) -> list[list[str]]:
    """Return the modules of stages of the given numbers of layers.

    >>> module_names((1, 0), "lm_head")
    [['tok_embeddings', 'layers.0'], ['norm', 'lm_head']]
    """
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    stages = [
        [f"layers.{start + layer}" for layer in range(count)]
        for start, count in zip(starts, counts, strict=True)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    return stages


def _recomputation(plan: Plan) -> str:
    policies = set(map(str, plan.memory_policy))
    return "selective" if "selective" in policies else "full" if "layers" in policies else "none"
