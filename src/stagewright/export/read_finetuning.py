"""Import of fine-tunings of axolotl, LLaMA-Factory, TRL and unsloth as options of `stagewright finetune`.

Source: their documentation and examples: axolotl at 067b021c, LLaMA-Factory at ff6d4d12; defaults of transformers, peft and
TRL.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.documents import parse_yaml, read_text
from stagewright.errors import InputError

_REMEDY = "give YAML of axolotl, LLaMA-Factory or TRL, or a Python script of TRL or unsloth"


@dataclass(frozen=True)
class FinetuneReading:
    """A fine-tuning read from a file, and what was left out."""

    what: str
    """The program that it is for."""
    model: str | None
    options: Mapping[str, Any]
    """Values of options of `finetune`, by name."""
    job: Mapping[str, Any]
    """Fields of the job that have no option."""
    num_read: int
    num_without_influence: int
    """Number of settings that say where results go, or how the other program spends memory and time."""
    notes: tuple[str, ...] = ()
    """Settings that were left out or changed, a sentence each."""

    def summary(self) -> str:
        """Return how much of the file was read, in words."""
        return (
            f"a fine-tuning of {self.what}: {self.num_read} settings read, {self.num_without_influence} without influence, "
            f"{len(self.notes) or 'none'} not taken as they are"
        )


@dataclass
class _Draft:
    """A reading in the making: `settings` that are left, and what came of the others."""

    settings: dict[str, Any]
    origin: Path
    options: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_read: int = 0

    def take(self, key: str, default: Any = None) -> Any:
        """Return a setting, or `default` where it is absent or null."""
        value = self.settings.pop(key, None)
        if value is None:
            return default
        self.num_read += 1
        return value

    def note(self, key: str, value: Any, why: str = "") -> None:
        text = json.dumps(value, default=str)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        self.notes.append(f"{key} = {shown}" + (f": {why}" if why else ""))


_SHOWN = 80
"""Characters of a value in a note."""
_NAMES = """
    activation_offloading args attn_implementation bf16_full_eval bfloat16 bias bnb_4bit_compute_dtype
    bnb_4bit_quant_type bnb_4bit_use_double_quant callbacks comet_ compute_metrics context_parallel_size
    cut_cross_entropy data_collator dataloader_ dataset_num_proc dataset_prepared_path dataset_processes ddp_ debug
    deepspeed device_map disable_gradient_checkpointing disable_tqdm do_eval do_train dp_replicate_size dp_shard_size
    eager_attention early_stopping_ enable_liger_kernel eot_tokens eval_ eval_accumulation_steps eval_sample_packing
    evals_per_epoch experimental_skip_move_to_device expert_parallel_size experts_implementation fast_inference
    flash_attention flash_attn flex_attention flex_attn_compile_kwargs formatting_func fsdp fsdp_config fsdp_version
    fused_attn_kernel gc_steps gpu_memory_utilization gradient_checkpointing gradient_checkpointing_kwargs
    group_by_length hub_ include_tokens_per_second is_falcon_derived_model is_llama_derived_model
    is_mistral_derived_model is_qwen_derived_model layer_offloading liger_ local_rank logging_ lora_embedding_kernel
    lora_mlp_kernel lora_o_kernel lora_qkv_kernel loss_watchdog_ low_cpu_mem_usage mlflow_ model_type
    optim_target_modules output_dir overwrite_ pad_to_sequence_len padding_free peft_config per_device_eval_batch_size
    plot_loss predict_with_ preprocessing_num_workers processing_class processor_type profiler_ push_
    quantization_method random_state remove_unused_columns report_to resume_from_checkpoint run_name sample_packing_
    save_ saves_per_epoch sdp_attention shuffle_merged_datasets skip_prepare_dataset special_tokens strict swanlab_
    task_type tensor_parallel_size tf32 token tokenizer tokenizer_type tokenizer_use_fast torch_compile
    torchdistx_path tp_size trackio_ trust_remote_code use_cache use_fast_tokenizer use_gradient_checkpointing
    use_kernels use_peft use_scattermoe use_sonicmoe use_tensorboard use_unsloth wandb_ xformers_attention
"""
_WITHOUT_INFLUENCE = frozenset(_NAMES.split())
"""Settings about memory and speed, which the plan decides, and about where results go; a name that ends with ``_`` stands
for all that begin with it."""
_HF_JOB = {"betas": (0.9, 0.999), "eps": 1e-8, "clip_norm": 1.0}
"""What a trainer of transformers has by default, and a job of ours has not."""


def read_finetuning(path: Path) -> FinetuneReading:
    """Read the fine-tuning in a file.

    Raises:
        InputError: it cannot be read, is none of these, or trains in another way than adapters by the loss of texts.
    """
    text = read_text(path, "configuration", _REMEDY)
    if path.suffix == ".py":
        settings, dialect = _of_script(text, path), _python
    else:
        document = parse_yaml(text, str(path))
        if not isinstance(document, dict):
            raise InputError(f"{path} holds no settings: {_REMEDY}")
        settings = {str(key): value for key, value in document.items()}
        dialect = next((read for mark, read in _DIALECTS.items() if mark in settings), None)
        if dialect is None:
            raise InputError(f"{path} names no model as axolotl, LLaMA-Factory or TRL do: {_REMEDY}")
    draft = _Draft(settings, path)
    try:
        what, model = dialect(draft)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} has a setting of another kind than its program takes ({error}): correct it there"
        ) from None
    without = [key for key in draft.settings if draft.settings[key] is None or _has_no_influence(key)]
    for key, value in draft.settings.items():
        if key not in without and value not in (False, "", [], {}):
            draft.note(key, value)
    return FinetuneReading(
        what, model, draft.options, draft.job, draft.num_read, len(without), tuple(draft.notes)
    )


def _has_no_influence(key: str) -> bool:
    """Return whether a setting changes nothing that is learnt.

    >>> _has_no_influence("fsdp_config"), _has_no_influence("liger_rope"), _has_no_influence("use_dora")
    (True, True, False)
    """
    return key in _WITHOUT_INFLUENCE or any(
        name.endswith("_") and key.startswith(name) for name in _WITHOUT_INFLUENCE
    )


# -- parts that programs share --------------------------------------------------------------------------------------------


def _training(draft: _Draft, defaults: Mapping[str, Any]) -> None:
    """Take what trainers of transformers call by the same names."""
    options, take = draft.options, draft.take
    options["learning_rate"] = float(take("learning_rate", defaults["learning_rate"]))
    schedule = str(take("lr_scheduler_type", take("lr_scheduler", defaults["lr_schedule"])))
    known = {
        "cosine": "cosine",
        "linear": "linear",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }
    known |= {"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
    if schedule not in known:
        draft.note("lr_scheduler", schedule, "cosine is taken")
    options["lr_schedule"] = known.get(schedule, "cosine")
    if (least := take("cosine_min_lr_ratio")) is not None:
        draft.job["final_fraction"] = float(least)
    ratio, steps = take("warmup_ratio"), take("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:  # a share, as transformers 5 takes it
        ratio, steps = steps, None
    if schedule == "constant":  # which transformers knows without a warm-up
        options["warmup_steps"] = 0
    elif steps:
        options["warmup_steps"] = int(steps)
    else:
        options["warmup_ratio"] = float(ratio or 0.0)
    options["weight_decay"] = float(take("weight_decay", 0.0))
    options["seed"] = int(take("seed", 42))
    most_steps = int(take("max_steps", -1))
    epochs = float(take("num_train_epochs", take("num_epochs", defaults["epochs"])))
    options |= {"steps": most_steps} if most_steps > 0 else {"epochs": epochs}
    draft.job |= _HF_JOB
    betas = take("adam_beta1", 0.9), take("adam_beta2", 0.999)
    draft.job |= {"betas": tuple(map(float, betas)), "eps": float(take("adam_epsilon", 1e-8))}
    clip = float(take("max_grad_norm", 1.0))
    draft.job["clip_norm"] = clip or None
    optimizer = take("optim", take("optimizer", "adamw_torch"))
    if "adamw" not in str(optimizer):
        draft.note("optimizer", optimizer, "AdamW is taken")
    elif any(bits in str(optimizer) for bits in ("8bit", "4bit")):
        draft.note("optimizer", optimizer, "AdamW is taken, with its state in fp32: adapters are small")


def _batch(draft: _Draft, per_device: int, names: tuple[str, str]) -> None:
    size, accumulation = (
        int(draft.take(name, default)) for name, default in zip(names, (per_device, 1), strict=True)
    )
    draft.options["global_batch"] = size * accumulation
    draft.notes.append(
        f"{names[0]} {size} x {names[1]} {accumulation} are the {size * accumulation} samples of a step of one process: "
        "if several trained together, give --global-batch for all of them"
    )


def _precision(draft: _Draft, bits: int | None) -> None:
    """Take the precision of the frozen model, of 4 or 8 `bits` where it is quantised."""
    bf16, fp16 = draft.take("bf16"), draft.take("fp16", draft.settings.pop("float16", None))
    pure = draft.take("pure_bf16")
    if bits is not None:
        draft.options["base"] = {4: "nf4", 8: "int8"}.get(bits, "auto")
    elif fp16 and not bf16:
        draft.options["base"] = "fp16"
    elif bf16 or pure:
        draft.options["base"] = "bf16"


def _targets(value: Any, is_all: bool = False) -> str | None:
    """Return the names of layers with adapters, as `--lora-targets` takes them."""
    if is_all or value in ("all", "all-linear"):
        return "all-linear"
    if isinstance(value, str):
        value = value.split(",")
    names = [str(name).strip() for name in value or ()]
    return ",".join(names) or None


def _data(draft: _Draft, path: str | None, what: str = "dataset") -> None:
    """Take a data set that is a file here, looked for next to the configuration too; name any other."""
    if path is None:
        return
    for candidate in (Path(path).expanduser(), draft.origin.parent / path):
        if candidate.exists():
            draft.options["data"] = str(candidate)
            return
    draft.note(
        what,
        path,
        "it is not here, and nothing is downloaded: get it (`hf download --repo-type dataset`) and give --data",
    )


def _refuse(origin: Path, key: str, value: Any) -> InputError:
    return InputError(
        f"{origin} has {key} = {value!r}, and finetune trains adapters by the loss of texts alone: "
        + (
            "plan the whole model with `stagewright plan` and train it with `run`"
            if key in ("adapter", "finetuning_type")
            else "use the program that it is for"
        )
    )


# -- programs -------------------------------------------------------------------------------------------------------------


def _axolotl(draft: _Draft) -> tuple[str, str]:
    take, options = draft.take, draft.options
    model = str(take("base_model"))
    if (kind := take("rl", "")) or (
        draft.settings.get("reward_model") or draft.settings.get("process_reward_model")
    ):
        raise _refuse(draft.origin, "rl", kind or "reward_model")
    adapter = take("adapter")
    if adapter not in ("lora", "qlora"):
        raise _refuse(draft.origin, "adapter", adapter)
    bits = (
        4 if take("load_in_4bit") or (adapter == "qlora" and not draft.settings.get("load_in_8bit")) else None
    )
    bits = 8 if bits is None and take("load_in_8bit") else bits
    options["lora"] = int(take("lora_r", 8))
    options["lora_alpha"] = float(take("lora_alpha", options["lora"]))
    options["lora_dropout"] = float(take("lora_dropout", 0.0))
    options["lora_targets"] = _targets(take("lora_target_modules"), bool(take("lora_target_linear")))
    if (start := take("lora_model_dir")) is not None:
        options["lora_from"] = str(start)
    options["sequence_length"] = int(take("sequence_len", 512))
    if take("sample_packing") is not True:
        draft.notes.append(
            "sample_packing is not set: documents are packed all the same, hidden from each other"
        )
    share = float(take("val_set_size", 0.0))
    if share >= 1:
        draft.note("val_set_size", share, "a share is taken, not a number: give --held-out SHARE")
    options["held_out"] = share if share < 1 else 0.0
    _axolotl_data(draft)
    _template(draft, take("chat_template"), ("tokenizer_default",))
    if take("train_on_inputs"):
        draft.note("train_on_inputs", True, "the loss is on the assistant's words alone")
    _batch(draft, 1, ("micro_batch_size", "gradient_accumulation_steps"))
    _precision(draft, bits)
    _training(draft, {"learning_rate": 2e-4, "lr_schedule": "cosine", "epochs": 1})
    return "axolotl", model


def _axolotl_data(draft: _Draft) -> None:
    sets = draft.take("datasets", [])
    for number, described in enumerate(sets if isinstance(sets, list) else [sets]):
        described = dict(described)
        path, kind = described.pop("path", None), described.pop("type", None)
        if number:
            draft.note(
                f"datasets[{number}]",
                path,
                "one data set is taken: put the files into one folder, and give it with --data",
            )
            continue
        _data(draft, None if path is None else str(path), "datasets[0].path")
        if kind in ("completion", "pretrain"):
            draft.options["text_field"] = described.pop("field", "text")
        elif not str(kind or "chat_template").startswith(("alpaca", "chat_template", "sharegpt")):
            draft.note("datasets[0].type", kind, "records are read by their own keys")
        roles = described.get("message_property_mappings")
        if roles in ({"role": "from", "content": "value"}, {"role": "role", "content": "content"}):
            described.pop("message_property_mappings")
        if described.get("field_messages") in ("messages", "conversations", "conversation"):
            described.pop("field_messages")
        for key, value in described.items():
            if value is not None and key not in ("ds_type", "data_files"):
                draft.note(f"datasets[0].{key}", value)


def _llama_factory(draft: _Draft) -> tuple[str, str]:
    take, options = draft.take, draft.options
    model = str(take("model_name_or_path"))
    if (stage := str(take("stage", "sft"))) not in ("sft", "pt"):
        raise _refuse(draft.origin, "stage", stage)
    if (method := str(take("finetuning_type", "lora"))) != "lora":
        raise _refuse(draft.origin, "finetuning_type", method)
    options["lora"] = int(take("lora_rank", 8))
    options["lora_alpha"] = float(take("lora_alpha", 2 * options["lora"]))
    options["lora_dropout"] = float(take("lora_dropout", 0.0))
    options["lora_targets"] = _targets(take("lora_target", "all"))
    if (start := take("adapter_name_or_path")) is not None:
        options["lora_from"] = str(start)
    options["sequence_length"] = int(take("cutoff_len", 2048))
    options["held_out"] = float(take("val_size", 0.0))
    if options["held_out"] >= 1:
        draft.note(
            "val_size", options.pop("held_out"), "a share is taken, not a number: give --held-out SHARE"
        )
    if take("packing") is not True:
        draft.notes.append("packing is not set: documents are packed all the same, hidden from each other")
    names = take("dataset", "")
    first, *others = (
        [name.strip() for name in names.split(",")] if isinstance(names, str) else map(str, names)
    )
    if first:
        _data(draft, _registered(draft, first))
    for name in others:
        draft.note(
            "dataset", name, "one data set is taken: put the files into one folder, and give it with --data"
        )
    _template(draft, take("template"), ())
    if take("train_on_prompt"):
        draft.note("train_on_prompt", True, "the loss is on the assistant's words alone")
    _batch(draft, 8, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    bits = take("quantization_bit")
    _precision(draft, None if bits is None else int(bits))
    if bits not in (None, 4, 8):
        draft.note("quantization_bit", bits)
    _training(draft, {"learning_rate": 5e-5, "lr_schedule": "linear", "epochs": 3})
    return "LLaMA-Factory", model


def _registered(draft: _Draft, name: str) -> str:
    """Return the file of a data set by its name in LLaMA-Factory's dataset_info.json, if that is near."""
    folder = Path(str(draft.take("dataset_dir", "data")))
    for parent in (Path(), draft.origin.parent, *draft.origin.resolve().parents):
        path = parent / folder / "dataset_info.json"
        if path.is_file():
            entry = json.loads(path.read_text(encoding="utf-8")).get(name, {})
            file = entry.get("file_name") if isinstance(entry, dict) else None
            return str(path.parent / file) if isinstance(file, str) else name
    return name


def _template(draft: _Draft, name: Any, own: tuple[str, ...]) -> None:
    if name is not None and name not in own:
        draft.note("chat template", name, "the one in the folder of the model's tokenizer is taken")


def _trl(draft: _Draft) -> tuple[str, str]:
    draft.settings.setdefault("learning_rate", 2e-5)
    return "TRL", str(_of_trainer(draft, rank=16, alpha=32, dropout=0.05, length=1024))


def _python(draft: _Draft) -> tuple[str, str]:
    is_unsloth = "FastLanguageModel" in draft.settings
    draft.settings.pop("FastLanguageModel", None)
    model = _of_trainer(
        draft, rank=16 if is_unsloth else 8, alpha=16 if is_unsloth else 8, dropout=0.0, length=1024
    )
    return "unsloth" if is_unsloth else "TRL", str(model)


def _of_trainer(draft: _Draft, rank: int, alpha: float, dropout: float, length: int) -> Any:
    """Take the arguments of TRL's trainer, of peft's LoraConfig, and unsloth's names of them; return the model."""
    take, options = draft.take, draft.options
    model = take("model_name_or_path", take("model_name"))
    if model is None:
        raise InputError(f"{draft.origin} does not say which model it is for: name MODEL")
    options["lora"] = int(take("r", take("lora_r", rank)))
    options["lora_alpha"] = float(take("lora_alpha", alpha))
    options["lora_dropout"] = float(take("lora_dropout", dropout))
    options["lora_targets"] = _targets(take("target_modules", take("lora_target_modules")))
    options["sequence_length"] = int(take("max_length", take("max_seq_length", length)))
    options["held_out"] = 0.0
    if take("packing") is not True:
        draft.notes.append("packing is not set: documents are packed all the same, hidden from each other")
    data = take("dataset_name", take("dataset"))
    _data(draft, None if data is None else str(data), "dataset_name")
    if (name := take("dataset_text_field", "text")) != "text":
        options["text_field"] = name
    _batch(draft, 8, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    bits = 4 if take("load_in_4bit") else 8 if take("load_in_8bit") else None
    dtype = str(take("dtype", take("torch_dtype", "")))
    for name, key in (("bfloat16", "bf16"), ("float16", "fp16")):
        if dtype == name or dtype.endswith(f".{name}"):
            draft.settings.setdefault(key, True)
    _precision(draft, bits)
    if take("load_in_fp8"):
        options["base"] = "fp8"
    _training(draft, {"learning_rate": 5e-5, "lr_schedule": "linear", "epochs": 3})
    return model


_DIALECTS: dict[str, Callable[[_Draft], tuple[str, str]]] = {
    "base_model": _axolotl, "finetuning_type": _llama_factory, "stage": _llama_factory, "model_name_or_path": _trl,
}  # fmt: skip
"""Readers by a key that only their files have, the first that matches."""

_CALLS = frozenset({
    "from_pretrained", "get_peft_model", "LoraConfig", "SFTConfig", "TrainingArguments", "SFTTrainer",
    "UnslothTrainingArguments", "BitsAndBytesConfig", "load_dataset",
})  # fmt: skip
"""Functions and classes whose arguments set up a fine-tuning."""


def _of_script(text: str, origin: Path) -> dict[str, Any]:
    """Return the arguments of the calls in a script that set up a fine-tuning; nothing is run.

    Ignores: values that are not written out where they are used, or in an assignment to the name that stands there.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not Python: {error}") from None
    names = dict(_assigned(tree))
    settings: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (name := _name(node.func)) not in _CALLS:
            continue
        if isinstance(node.func, ast.Attribute) and _name(node.func.value) == "FastLanguageModel":
            settings["FastLanguageModel"] = True
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        first = {
            "from_pretrained": "model_name",
            "load_dataset": "dataset_name",
            "SFTTrainer": "model_name",
        }.get(name)
        if node.args and first is not None and first not in settings:
            keywords.setdefault(first, node.args[0])
        if name == "SFTTrainer" and "model" in keywords:
            keywords.setdefault("model_name", keywords.pop("model"))
        for key, value in keywords.items():
            known, literal = _literal(value, names)
            if known and not (name in ("from_pretrained", "SFTTrainer") and key in settings):
                settings[key] = literal
    if not settings:
        raise InputError(f"{origin} calls nothing of TRL or unsloth that sets up a fine-tuning: {_REMEDY}")
    return settings


def _assigned(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the names that are assigned a value that is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known, literal = _literal(node.value, {})
            if known:
                yield node.targets[0].id, literal


def _literal(node: ast.expr, names: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether the value of an expression is written out, and the value; of an attribute, its name."""
    if isinstance(node, ast.Name):
        return node.id in names, names.get(node.id)
    if isinstance(node, ast.Attribute) and _name(node.value) == "torch":
        return True, node.attr
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False, None


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
