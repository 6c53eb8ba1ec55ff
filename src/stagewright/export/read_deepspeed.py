"""Import of the JSON configuration of DeepSpeed's `initialize`.

Source: DeepSpeed v0.19.5, docs/_pages/config-json.md. Ignores: settings of the training script, such as tensor
parallelism, and stages if the file has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.errors import InputError
from stagewright.export.reading import ModelRead, Reading, missing_model
from stagewright.planning.configuration import Configuration

_WITHOUT_INFLUENCE = {
    "optimizer", "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard",
    "wandb", "csv_monitor", "comms_logger", "flops_profiler", "prescale_gradients", "gradient_predivide_factor",
    "zero_allow_untested_optimizer", "checkpoint", "data_types", "monitor_config", "elasticity", "autotuning",
}  # fmt: skip
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
KEYS = frozenset({*_BATCH, "zero_optimization", "bf16", "fp16"})
"""A JSON with any of these keys is taken for DeepSpeed's."""


def read_deepspeed(document: Mapping[str, Any], origin: str) -> Reading:
    """Return the configuration in a document.

    Raises:
        InputError: an invalid value; names its key.
    """
    notes: list[str] = []
    batch, micro, steps = (_number(document, key, origin) for key in _BATCH)
    notes += _left_to_the_script(document, micro)
    dp = batch // micro // steps if batch and micro and steps else None
    if dp is not None and dp * (micro or 1) * (steps or 1) != batch:
        raise InputError(
            f"{origin}: train_batch_size {batch} is not a multiple of train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps}: change one of the three"
        )
    pipeline, zero = _table(document, "pipeline", origin), _table(document, "zero_optimization", origin)
    checkpointing = _table(document, "activation_checkpointing", origin)
    pp = _stages(pipeline, origin, notes)
    level = _decided(zero, "stage", 0, "zero_optimization", notes)
    if level not in (0, 1, 2, 3) or isinstance(level, bool):
        raise InputError(f"{origin}: zero_optimization.stage = {level!r}: give 0, 1, 2 or 3")
    reduce = document.get("communication_data_type")
    interval = _decided(pipeline, "activation_checkpoint_interval", 0, "pipeline", notes)
    if isinstance(interval, int) and interval > 1:
        notes.append(
            f"pipeline.activation_checkpoint_interval {interval} is predicted as 1: every layer by itself"
        )
    configuration = Configuration(
        pp=pp or 0,
        dp=dp or 0,
        microbatch=micro or 1,
        recompute="full" if interval else "none",
        zero=level or None,
        reduce_dtype=reduce if reduce in ("bf16", "fp32") else None,
    )
    taken = {
        *_BATCH,
        "pipeline",
        "zero_optimization",
        "bf16",
        "fp16",
        "communication_data_type",
        "activation_checkpointing",
    }
    notes += [
        f"zero_optimization.{key} is not in the prediction"
        for key, value in zero.items()
        if key not in ("stage", "overlap_comm") and not _is_off(value)
    ]
    notes += [
        f"{name}.{key} is not in the prediction"
        for name in ("bf16", "fp16")
        for key, value in _table(document, name, origin).items()
        if key not in _OF_HALF_PRECISION and not _is_off(value)
    ]
    notes += _optimizer(document, origin)
    notes += [
        f"activation_checkpointing.{key} is not in the prediction: it is for layers that the model itself checkpoints"
        for key, value in checkpointing.items()
        if not _is_off(value)
    ]
    if reduce not in (None, "bf16", "fp32"):
        notes.append(f"communication_data_type {reduce} is not in the prediction")
    notes += [
        f"{key} is not in the prediction"
        for key, value in document.items()
        if key not in taken | _WITHOUT_INFLUENCE and not _is_off(value)
    ]
    dtype = _dtype(document, origin, notes)
    return Reading(
        what="DeepSpeed's configuration",
        runtime=None,
        job={"dtype": dtype, **({"global_batch": batch} if batch else {})},
        configuration=configuration,
        samples_per_replica=micro and micro * (steps or 1),
        read_model=lambda: _no_model(origin),
        num_read=len(taken & document.keys()),
        num_without_influence=len(_WITHOUT_INFLUENCE & document.keys()),
        notes=tuple(notes),
    )


def _left_to_the_script(document: Mapping[str, Any], micro: int | None) -> Iterator[str]:
    """Yield which sizes of the batch are ``auto``."""
    auto = [key for key in _BATCH if document.get(key) == "auto"]
    if auto:
        assumed = "" if micro else ": microbatches of 1 are assumed"
        yield f"{', '.join(auto)}: auto, which the training script decides{assumed}"


def _optimizer(document: Mapping[str, Any], origin: str) -> Iterator[str]:
    """Yield the optimizer if it is not AdamW."""
    name = _table(document, "optimizer", origin).get("type")
    if name is not None and str(name).lower() not in ("adam", "adamw", "auto"):
        yield f"optimizer {name} is predicted as AdamW"


_OF_HALF_PRECISION = {
    "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
    "consecutive_hysteresis",
}  # fmt: skip
"""Keys of the tables of half precision that are read, or affect neither time nor memory."""


def _no_model(origin: str) -> ModelRead:
    raise missing_model(origin)


def _number(document: Mapping[str, Any], key: str, origin: str) -> int | None:
    """Return a number above 0; None if it is absent or ``auto``."""
    value = document.get(key)
    if value in (None, "auto"):
        return None
    if type(value) is not int or value < 1:
        raise InputError(f"{origin}: {key} = {value!r}: give a whole number of at least 1")
    return value


def _table(document: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    """Return a table; empty if it is absent, null or false."""
    value = document.get(key)
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{origin}: {key} = {value!r}: give a table, as {{...}}")
    return value


def _decided(table: Mapping[str, Any], key: str, default: Any, name: str, notes: list[str]) -> Any:
    """Return a value; `default` if it is absent, null or ``auto``, which leaves it to the training script."""
    value = table.get(key)
    if value == "auto":
        shown = json.dumps(default)
        notes.append(f"{name}.{key} is auto, which the training script decides: {shown} is assumed")
        return default
    return default if value is None else value


def _is_off(value: Any) -> bool:
    """Return whether a value enables nothing: false, null, 0, device none, or a table that is disabled or of such values."""
    if isinstance(value, Mapping):
        if "device" in value:
            return value["device"] in (None, "none")
        return value.get("enabled") is False or (bool(value) and all(map(_is_off, value.values())))
    return value is None or value is False or value == 0


def _stages(pipeline: Mapping[str, Any], origin: str, notes: list[str]) -> int:
    stages = _number(pipeline, "stages", f"{origin}: pipeline") or 1
    if stages > 1:
        notes.append(
            f"pipeline.stages {stages} is predicted with even layers; DeepSpeed takes it from the script's PipelineModule "
            "alone"
        )
    return stages


def _dtype(document: Mapping[str, Any], origin: str, notes: list[str]) -> str:
    enabled = [
        name
        for name in ("bf16", "fp16")
        if _decided(_table(document, name, origin), "enabled", False, name, notes)
    ]
    return enabled[0] if enabled else "fp32"
