"""A JSON of DeepSpeed's `initialize` as a configuration.

Source: DeepSpeed v0.19.5, docs/_pages/config-json.md. Ignores: what the training script says, such as tensor
parallelism, and stages where the file has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.errors import InputError
from stagewright.export.reading import ModelRead, Reading, says_no_model
from stagewright.planning.configuration import Configuration

_WITHOUT_INFLUENCE = {
    "optimizer", "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard",
    "wandb", "csv_monitor", "comms_logger", "flops_profiler", "prescale_gradients", "gradient_predivide_factor",
    "zero_allow_untested_optimizer", "checkpoint", "data_types", "monitor_config", "elasticity", "autotuning",
}  # fmt: skip
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
KEYS = frozenset({*_BATCH, "zero_optimization", "bf16", "fp16"})
"""By some of which a JSON is one of DeepSpeed's."""


def read_deepspeed(document: Mapping[str, Any], origin: str) -> Reading:
    """What a document says.

    Raises:
        InputError: a value that cannot be; names its key.
    """
    notes: list[str] = []
    batch, micro, steps = (_number(document, key, origin) for key in _BATCH)
    dp = batch // micro // steps if batch and micro and steps else None
    if dp is not None and dp * (micro or 1) * (steps or 1) != batch:
        raise InputError(
            f"{origin}: train_batch_size {batch} is no multiple of train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps}: change one of the three"
        )
    pipeline, zero = _table(document, "pipeline", origin), _table(document, "zero_optimization", origin)
    pp = _stages(pipeline, origin, notes)
    level = zero.get("stage", 0)
    if level not in (0, 1, 2, 3):
        raise InputError(f"{origin}: zero_optimization.stage = {level!r}: give 0, 1, 2 or 3")
    reduce = document.get("communication_data_type")
    recomputes = (
        bool(pipeline.get("activation_checkpoint_interval")) or "activation_checkpointing" in document
    )
    configuration = Configuration(
        pp=pp,
        dp=dp,
        microbatch=micro or 1,
        recompute="full" if recomputes else "none",
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
        for key in zero
        if key not in ("stage", "overlap_comm")
    ]
    notes += [f"{key} is not in the prediction" for key in document if key not in taken | _WITHOUT_INFLUENCE]
    return Reading(
        what="DeepSpeed's configuration",
        runtime=None,
        job={"dtype": _dtype(document, origin), **({"global_batch": batch} if batch else {})},
        configuration=configuration,
        read_model=lambda: _no_model(origin),
        num_read=len(taken & document.keys()),
        num_without_influence=len(_WITHOUT_INFLUENCE & document.keys()),
        notes=tuple(notes),
    )


def _no_model(origin: str) -> ModelRead:
    raise says_no_model(origin)


def _number(document: Mapping[str, Any], key: str, origin: str) -> int | None:
    """A number above 0; None where it is absent or ``auto``."""
    value = document.get(key)
    if value in (None, "auto"):
        return None
    if type(value) is not int or value < 1:
        raise InputError(f"{origin}: {key} = {value!r}: give a whole number of at least 1")
    return value


def _table(document: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{origin}: {key} = {value!r}: give a table, as {{...}}")
    return value


def _stages(pipeline: Mapping[str, Any], origin: str, notes: list[str]) -> int:
    stages = _number(pipeline, "stages", f"{origin}: pipeline") or 1
    partition = pipeline.get("partition", "best")
    if stages > 1 and partition != "uniform":
        notes.append(
            f"pipeline.partition {partition} is predicted as uniform: as many layers on every stage as can be"
        )
    return stages


def _dtype(document: Mapping[str, Any], origin: str) -> str:
    for name in ("bf16", "fp16"):
        if _table(document, name, origin).get("enabled"):
            return name
    return "fp32"
