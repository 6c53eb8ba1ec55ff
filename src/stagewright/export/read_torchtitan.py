"""Import of the TOML configuration of torchtitan.

Source: torchtitan v0.2.2, whose sections and keys `formats/torchtitan.toml` lists. Ignores: options of its command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.documents import read_text
from stagewright.errors import InputError, ScheduleError, nearest
from stagewright.export.reading import ModelRead, Reading
from stagewright.export.torchtitan import ANY_ORDER, RUNTIME, SCHEDULES, known_keys, model_text
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.schedule import Program, read_torch_csv

_WITHOUT_INFLUENCE = (
    "job", "profiling", "metrics", "optimizer", "lr_scheduler", "training.dataloader", "checkpoint", "comm",
    "memory_estimation", "validation", "validation.dataloader", "debug",
)  # fmt: skip
"""Sections that affect neither time nor memory of a step."""
_KEYS_WITHOUT_INFLUENCE = {
    "model.name", "model.flavor", "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion",
    "training.dataset", "training.dataset_path", "training.max_norm", "training.steps", "training.gc_freq",
    "training.gc_debug", "activation_checkpoint.preserve_rng_state", "activation_checkpoint.early_stop",
    "activation_checkpoint.determinism_check", "activation_checkpoint.debug", "compile.components", "compile.backend",
}  # fmt: skip
_LAYER = re.compile(r"layers\.\d+")


@dataclass
class Keys:
    """Keys with their sections, such as ``training.seq_len``; `read` collects those that were read."""

    given: Mapping[str, Any]
    origin: str
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any) -> Any:
        """Return a value. Raises `InputError` if its type is not the default's."""
        self.read.add(key)
        value = self.given.get(key, default)
        if default is not None and type(value) is not type(default):
            raise InputError(f"{self.origin}: {key} = {value!r}: give a value such as {default!r}")
        return value

    def degree(self, name: str) -> int:
        """Return a degree of parallelism. Raises `InputError` if it is below 1."""
        value = self.get(f"parallelism.{name}", 1)
        if value < 1:
            raise InputError(
                f"{self.origin}: parallelism.{name} = {value}: give a number of ranks, at least 1"
            )
        return value


def read_torchtitan(table: Mapping[str, Any], origin: str) -> Reading:
    """Return the configuration in a table.

    Raises:
        InputError: an invalid value; names its key.
    """
    keys = Keys(dict(_flat(table, "")), origin)
    configuration = _configuration(keys)
    job = _job(keys)
    known_names = {f"{section}.{key}" for section, names in known_keys().items() for key in names}
    quiet = {key for key in keys.given if _is_without_influence(key)}
    for key in keys.given:
        if key not in known_names:
            keys.notes.append(f"{key} is not known{nearest(key, known_names)}")
        elif key not in keys.read | quiet:
            keys.notes.append(f"{key} is not in the prediction")
    return Reading(
        what="torchtitan's configuration (v0.2.2)",
        runtime=RUNTIME,
        job=job,
        samples_per_replica=keys.get("training.local_batch_size", 8),
        read_model=lambda: _model(keys),
        configuration=configuration,
        num_read=len(keys.read & keys.given.keys()),
        num_without_influence=len(quiet),
        notes=tuple(keys.notes),
    )


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_without_influence(key: str) -> bool:
    return key.rpartition(".")[0] in _WITHOUT_INFLUENCE or key in _KEYS_WITHOUT_INFLUENCE


def _model(keys: Keys) -> ModelRead:
    name, flavor = (str(keys.given.get(f"model.{key}", "")) for key in ("name", "flavor"))
    text = model_text(name, flavor)
    if text is None:
        raise InputError(
            f"{keys.origin}: model.name = '{name}' with model.flavor = '{flavor}' is not a known model: name MODEL"
        )
    return ModelRead(text)


def _configuration(keys: Keys) -> Configuration:
    pp, tp, cp = (keys.degree(f"{kind}_parallel_degree") for kind in ("pipeline", "tensor", "context"))
    copies = keys.degree("data_parallel_replicate_degree")
    shards = keys.get("parallelism.data_parallel_shard_degree", -1)
    if shards == 0 or shards < -1:
        raise InputError(
            f"{keys.origin}: parallelism.data_parallel_shard_degree = {shards}: give ranks, or -1 for all"
        )
    local = keys.get("training.local_batch_size", 8)
    chunks, layers, schedule, order = _pipeline(keys, pp) if pp > 1 else (None, None, "1f1b", None)
    return Configuration(
        pp=pp,
        dp=0 if shards == -1 else copies * shards,
        tp=tp,
        cp=cp,
        ep=keys.degree("expert_parallel_degree"),
        sequence_parallel=tp > 1,
        microbatch=keys.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local,
        schedule=schedule,
        chunks=chunks,
        layers_per_stage=layers,
        recompute=_recompute(keys),
        zero=_level(keys, pp, shards, cp),
        shard_size=shards * cp if copies > 1 and shards > 1 else None,
        program=order,
    )


def _job(keys: Keys) -> dict[str, Any]:
    param = keys.get("training.mixed_precision_param", "bfloat16")
    if keys.get("training.dtype", "float32") != "float32":
        keys.notes.append("training.dtype is predicted as float32 with mixed precision")
    converters = [str(converter) for converter in keys.get("model.converters", [])]
    is_eight = any("float8" in converter for converter in converters)
    keys.notes.extend(
        f"model.converters: {converter} is not in the prediction"
        for converter in converters
        if "linear.float8" not in converter
    )
    job: dict[str, Any] = {
        "sequence_length": keys.get("training.seq_len", 2048),
        "dtype": "fp8" if is_eight else "fp32" if param == "float32" else "bf16",
        "compiled": keys.get("compile.enable", False),
    }
    batch = keys.get("training.global_batch_size", -1)
    return job | ({"global_batch": batch} if batch > 0 else {})


def _level(keys: Keys, pp: int, shards: int, cp: int) -> int | None:
    """Return the ZeRO level: 3 if parameters are resharded after the forward and gathered again for the backward."""
    policy = keys.get("parallelism.fsdp_reshard_after_forward", "default")
    if shards * cp == 1:
        return None
    if policy not in ("default", "always", "never"):
        policies = ("default", "always", "never")
        raise InputError(
            f"{keys.origin}: parallelism.fsdp_reshard_after_forward = {policy!r}{nearest(policy, policies)}: give one of "
            f"{', '.join(policies)}"
        )
    if policy == "always" or (policy == "default" and pp == 1):
        return 3
    return 1 if pp > 1 else 2


def _pipeline(keys: Keys, pp: int) -> tuple[int | None, tuple[int, ...] | None, str, Program | None]:
    """Return the stages per rank, the layers of each stage, and the name and order of the schedule."""
    name = keys.get("parallelism.pipeline_parallel_schedule", "1F1B")
    file = keys.get("parallelism.pipeline_parallel_schedule_csv", "")
    parts = keys.get("parallelism.module_fqns_per_model_part", None)
    layers = None if parts is None else _layers(parts, keys, pp)
    if layers is None:
        keys.notes.append("stages are predicted with even numbers of layers: give module_fqns_per_model_part")
    chunks = None if layers is None or len(layers) == pp else len(layers) // pp
    if file:
        if layers is None:
            raise InputError(
                f"{keys.origin}: parallelism.pipeline_parallel_schedule_csv says the order of stages that "
                "module_fqns_per_model_part has to name: add it"
            )
        return chunks, layers, "file", _order(keys, file)
    names = {torch_name.lower(): name_here for name_here, torch_name in SCHEDULES.items()}
    if name.lower() not in names:
        raise InputError(
            f"{keys.origin}: parallelism.pipeline_parallel_schedule = {name!r}{nearest(name, SCHEDULES.values())}: known "
            f"are {', '.join(SCHEDULES.values())}, and {ANY_ORDER} with pipeline_parallel_schedule_csv"
        )
    schedule = names[name.lower()]
    if schedule in ("interleaved-1f1b", "breadth-first", "interleaved-zb"):
        chunks = chunks or (1 if layers else 2)
    return chunks if schedule not in ("zb-v", "dualpipe-v") else None, layers, schedule, None


def _layers(parts: Any, keys: Keys, pp: int) -> tuple[int, ...]:
    where = f"{keys.origin}: parallelism.module_fqns_per_model_part"
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise InputError(f"{where}: give a list of names for each stage")
    if len(parts) % pp or not parts:
        raise InputError(
            f"{where} has {len(parts)} stages, not a multiple of pipeline_parallel_degree {pp}: give as many on each rank"
        )
    return tuple(sum(bool(_LAYER.fullmatch(str(name))) for name in part) for part in parts)


def _order(keys: Keys, file: str) -> Program:
    path = Path(keys.origin).parent / file
    try:
        program = read_torch_csv(read_text(path, "schedule"))
    except ScheduleError as error:
        raise InputError(f"{path}: {error}") from None
    return program.compute_only()


def _recompute(keys: Keys) -> Recompute:
    mode = keys.get("activation_checkpoint.mode", "selective")
    option = keys.get("activation_checkpoint.selective_ac_option", "2")
    if mode not in ("none", "full", "selective", "memory_budget"):
        raise InputError(
            f"{keys.origin}: activation_checkpoint.mode = {mode!r}: give none, full, selective or memory_budget"
        )
    if mode == "memory_budget":
        keys.notes.append("activation_checkpoint.mode memory_budget is predicted as selective")
        return "selective"
    if mode == "selective" and option != "op":
        keys.notes.append(f"activation_checkpoint.selective_ac_option {option!r} is predicted as 'op'")
    return mode
