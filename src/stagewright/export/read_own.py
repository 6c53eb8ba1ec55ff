"""A TOML with the options of `stagewright estimate` as a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stagewright.errors import InputError, nearest
from stagewright.export.reading import ModelRead, Reading, says_no_model
from stagewright.planning.configuration import Configuration

_JOB = ("global_batch", "sequence_length", "dtype", "compiled", "memory_limit")
_FIELDS = {one.name: one.type for one in fields(Configuration) if one.name != "program"}
_TEXTS = {
    "recompute": ("none", "full", "selective", "model"), "reduce_dtype": ("fp32", "bf16"),
}  # fmt: skip


def read_own(table: Mapping[str, Any], origin: str) -> Reading:
    """What a table says; keys are written with ``-`` or ``_``.

    Raises:
        InputError: there is no such option, or its value cannot be; names the key.
    """
    given = {key.replace("-", "_"): value for key, value in table.items()}
    known = [*_FIELDS, *_JOB, "runtime", "model", "set"]
    for key in given:
        if key not in known:
            raise InputError(
                f"{origin}: unknown key '{key}'{nearest(key, known)}; the keys are options of estimate: {', '.join(known)}"
            )
    asked = {key: _checked(key, value, origin) for key, value in given.items() if key in _FIELDS}
    return Reading(
        what="options of estimate",
        runtime=given.get("runtime"),
        job={key: given[key] for key in _JOB if key in given},
        configuration=Configuration(**asked),
        num_read=len(given),
        read_model=lambda: _model(given, origin),
    )


def _model(given: Mapping[str, Any], origin: str) -> ModelRead:
    """Raises `InputError` for values of another kind."""
    text, settings = given.get("model"), given.get("set", {})
    if text is None:
        raise says_no_model(origin)
    if not isinstance(text, str):
        raise InputError(f"{origin}: model = {text!r}: give what MODEL may be, as 'llama-3-8b'")
    if not isinstance(settings, dict):
        raise InputError(f"{origin}: set = {settings!r}: give a table of keys of the model's configuration")
    try:
        json.dumps(settings)
    except TypeError:
        raise InputError(
            f"{origin}: set has a date or a time, as no configuration of a model has: write it as a text"
        ) from None
    return ModelRead(text, settings)


def _checked(key: str, value: Any, origin: str) -> Any:
    """Raises `InputError` for a value of another kind."""
    least = 0 if key == "zero" else 1
    if key == "layers_per_stage":
        if isinstance(value, list) and all(type(count) is int and count >= 0 for count in value):
            return tuple(value)
        raise InputError(f"{origin}: {key} = {value!r}: give a list of numbers of layers, as [3, 4, 4, 3]")
    if key == "sequence_parallel":
        is_right, what = isinstance(value, bool), "true or false"
    elif key in _TEXTS:
        is_right, what = value in _TEXTS[key], f"one of {', '.join(_TEXTS[key])}"
    elif key == "schedule":
        is_right, what = isinstance(value, str), "the name of a schedule"
    else:
        is_right, what = type(value) is int and value >= least, f"a whole number of at least {least}"
    if not is_right:
        raise InputError(f"{origin}: {key} = {value!r}: give {what}")
    return value
