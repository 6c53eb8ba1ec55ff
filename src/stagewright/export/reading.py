"""Import of configurations of other frameworks and of Stagewright as options of `estimate`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.documents import parse_json, parse_toml, read_text
from stagewright.errors import InputError, nearest
from stagewright.planning.configuration import Configuration, requested_fields


@dataclass(frozen=True)
class ModelRead:
    """The model that a file describes: its MODEL, keys of its configuration that differ, and sentences on what was
    ignored."""

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        changed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.settings.items())
        return f"{self.text} with {changed}" if changed else self.text


def missing_model(origin: str) -> InputError:
    """Return the error for a file without a model if MODEL is omitted."""
    return InputError(f"{origin} does not say which model it is for: name MODEL")


@dataclass(frozen=True)
class Reading:
    """A configuration read from a file, and what was ignored."""

    what: str
    """The kind of file, for messages."""
    runtime: str | None
    """The runtime it configures; None if it does not say."""
    job: Mapping[str, Any]
    """Fields of the job."""
    configuration: Configuration
    read_model: Callable[[], ModelRead]
    """Read its model; raises `InputError` if the file does not describe it."""
    num_read: int
    """Number of settings that were read."""
    samples_per_replica: int | None = None
    """Samples per step of each replica, for a file that does not say the global batch."""
    num_without_influence: int = 0
    """Number of settings that affect neither time nor memory of a step."""
    notes: tuple[str, ...] = ()
    """Settings that were ignored or changed, a sentence each."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Its options of the model, in Megatron-LM's names."""

    def summary(self) -> str:
        """Return how much of the file was read, in words."""
        parts = [f"{self.num_read} settings read"]
        parts += [f"{len(self.model)} of the model"] if self.model else []
        parts += [f"{self.num_without_influence} without influence"] if self.num_without_influence else []
        return f"{self.what}: {', '.join(parts)}, {len(self.notes) or 'none'} not taken as they are"


_REMEDY = (
    "give a shell file or argv.json of Megatron-LM, a TOML of torchtitan, a JSON of DeepSpeed, or a TOML with options of "
    "`stagewright estimate`"
)


_OPTIONS = "write its degrees as options of `stagewright estimate`, on the command line or in a TOML"
_FINETUNE = f"train as it says with `stagewright finetune --from`, or {_OPTIONS}"
_YAML, _PYTHON = (".yaml", ".yml"), (".py",)
_NOT_READ = tuple(
    (name, suffixes, re.compile(mark, re.MULTILINE), remedy)
    for name, suffixes, mark, remedy in (
        ("a configuration of LLaMA-Factory", _YAML, r"^(finetuning_type|stage):", _FINETUNE),
        ("a configuration of axolotl", _YAML, r"^base_model:", _FINETUNE),
        ("a recipe of NeMo Automodel", _YAML, r"nemo_automodel|NeMoAuto|^distributed:", _OPTIONS),
        ("a configuration of Megatron-Bridge", _YAML, r"^(model|train|ddp|optimizer):", _OPTIONS),
        (
            "a recipe of Megatron-Bridge",
            _PYTHON,
            r"megatron\.bridge",
            "give the plan, or its export to megatron",
        ),
        (
            "a configuration of torchtitan 0.3",
            _PYTHON,
            r"\btorchtitan\b",
            "give the plan, or its export to torchtitan-0.2",
        ),
        ("YAML", _YAML, "", _OPTIONS),
        ("Python code", _PYTHON, "", _OPTIONS),
    )
)
"""Formats that are told apart but not read, the first that matches: name, endings, what marks it, and what to do."""


def read_configuration(path: str | Path) -> Reading:
    """Read the file at `path`: arguments of Megatron-LM, torchtitan's TOML, DeepSpeed's JSON, or Stagewright's TOML. The
    arguments that a shell script is started with may follow its path.

    Raises:
        InputError: there is no such file, or it is none of these; names the location, and the format if it is known.
    """
    path, *arguments = _command(str(path))
    text = read_text(path, "configuration", _REMEDY)
    suffix = Path(path).suffix
    for name, suffixes, mark, remedy in _NOT_READ:
        if suffix in suffixes and mark.search(text):
            raise InputError(f"{path} is {name}, which is not among the formats that are read: {remedy}")
    if suffix == ".toml":
        return _of_toml(parse_toml(text, str(path)), str(path))
    if suffix == ".json":
        return _of_json(parse_json(text, str(path)), str(path))
    from stagewright.export.read_megatron import read_arguments

    return read_arguments(text, str(path), arguments)


def _command(text: str) -> list[str]:
    """Return the path of a file, followed by arguments if the text is a command that starts a script with some."""
    if not os.path.exists(text):  # which, unlike Path.exists, bears a text too long for a name
        with contextlib.suppress(ValueError):  # a quote has no end
            path, *arguments = shlex.split(text) or [text]
            if arguments and os.path.isfile(path):
                return [path, *arguments]
    return [text]


def _of_toml(table: Mapping[str, Any], origin: str) -> Reading:
    """Read torchtitan's tables, or keys that are options of `estimate`."""
    from stagewright.export.read_torchtitan import read_torchtitan

    sections = ("training", "parallelism", "activation_checkpoint")
    return (read_torchtitan if any(section in table for section in sections) else _read_options)(
        table, origin
    )


def _of_json(document: Any, origin: str) -> Reading:
    from stagewright.export.read_deepspeed import KEYS, read_deepspeed
    from stagewright.export.read_megatron import read_argv

    if isinstance(document, list):
        return read_argv(document, origin)
    if isinstance(document, dict) and KEYS & document.keys():
        return read_deepspeed(document, origin)
    raise InputError(f"{origin} is not a known kind of configuration: {_REMEDY}")


_JOB = ("global_batch", "sequence_length", "dtype", "compiled", "memory_limit")
_FIELDS = [name for name in requested_fields() if name != "program"]


def _read_options(table: Mapping[str, Any], origin: str) -> Reading:
    """Read options of `estimate`; keys are written with ``-`` or ``_``.

    Raises:
        InputError: there is no such option, or its value is invalid; names the key.
    """
    given = {key.replace("-", "_"): value for key, value in table.items()}
    names = [*_FIELDS, *_JOB, "runtime", "model", "set"]
    for key in given:
        if key not in names:
            raise InputError(
                f"{origin}: unknown key '{key}'{nearest(key, names)}; the keys are options of estimate: {', '.join(names)}"
            )
    try:
        configuration = Configuration.of(**{key: given[key] for key in _FIELDS if key in given})
    except InputError as error:
        raise InputError(f"{origin}: {error}") from None
    return Reading(
        what="options of estimate",
        runtime=given.get("runtime"),
        job={key: given[key] for key in _JOB if key in given},
        configuration=configuration,
        num_read=len(given),
        read_model=lambda: _model(given, origin),
    )


def _model(given: Mapping[str, Any], origin: str) -> ModelRead:
    """Return the model. Raises `InputError` for values of the wrong type."""
    text, settings = given.get("model"), given.get("set", {})
    if text is None:
        raise missing_model(origin)
    if not isinstance(text, str):
        raise InputError(f"{origin}: model = {text!r}: give a MODEL, such as 'llama-3-8b'")
    if not isinstance(settings, dict):
        raise InputError(f"{origin}: set = {settings!r}: give a table of keys of the model's configuration")
    try:
        json.dumps(settings)
    except TypeError:
        raise InputError(
            f"{origin}: set has a date or a time, which configurations of models cannot have: write it as a string"
        ) from None
    return ModelRead(text, settings)
