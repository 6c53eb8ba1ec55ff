"""Configurations that people have, of other frameworks and of our own, read as what `estimate` takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.documents import parse_json, parse_toml, read_text
from stagewright.errors import InputError
from stagewright.planning.configuration import Configuration


@dataclass(frozen=True)
class ModelRead:
    """The model that a file describes: what names it here, keys of its configuration that are otherwise, and sentences on
    what of it is not taken."""

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        changed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.settings.items())
        return f"{self.text} with {changed}" if changed else self.text


def says_no_model(origin: str) -> InputError:
    """What is wrong with leaving MODEL out then."""
    return InputError(f"{origin} does not say which model it is for: name MODEL")


@dataclass(frozen=True)
class Reading:
    """What a file says of a configuration, and what of it is not taken."""

    what: str
    """What the file is, in words."""
    runtime: str | None
    """Whose execution it configures; None where it does not say."""
    job: Mapping[str, Any]
    """Keys of a job."""
    configuration: Configuration
    read_model: Callable[[], ModelRead]
    """The model that it is for; raises `InputError` where it does not say enough."""
    num_read: int
    """Settings that are taken."""
    num_without_influence: int = 0
    """Those on which neither time nor memory of a step depends."""
    notes: tuple[str, ...] = ()
    """Those that are not taken, or not as they are, a sentence each."""
    model: Mapping[str, str] = field(default_factory=dict)
    """What it says of the model, as options of Megatron-LM."""

    def summary(self) -> str:
        """How much of the file is taken, in words."""
        parts = [f"{self.num_read} settings read"]
        parts += [f"{len(self.model)} of the model"] if self.model else []
        parts += [f"{self.num_without_influence} without influence"] if self.num_without_influence else []
        return f"{self.what}: {', '.join(parts)}, {len(self.notes) or 'none'} not taken as they are"


_REMEDY = (
    "give a shell file or argv.json of Megatron-LM, a TOML of torchtitan, a JSON of DeepSpeed, or a TOML with options of "
    "`stagewright estimate`"
)


def read_configuration(path: str | Path) -> Reading:
    """What the file at `path` configures: arguments of Megatron-LM, torchtitan's TOML, DeepSpeed's JSON, or our own TOML.

    Raises:
        InputError: there is no such file, or it is none of these; names the place.
    """
    text = read_text(path, "configuration", _REMEDY)
    suffix = Path(path).suffix
    if suffix == ".toml":
        return _of_toml(parse_toml(text, str(path)), str(path))
    if suffix == ".json":
        return _of_json(parse_json(text, str(path)), str(path))
    from stagewright.export.read_megatron import read_arguments

    return read_arguments(text, str(path))


def _of_toml(table: Mapping[str, Any], origin: str) -> Reading:
    """torchtitan's tables, or keys that are options."""
    from stagewright.export.read_own import read_own
    from stagewright.export.read_torchtitan import read_torchtitan

    sections = ("training", "parallelism", "activation_checkpoint")
    return (read_torchtitan if any(section in table for section in sections) else read_own)(table, origin)


def _of_json(document: Any, origin: str) -> Reading:
    from stagewright.export.read_deepspeed import KEYS, read_deepspeed
    from stagewright.export.read_megatron import read_argv

    if isinstance(document, list):
        return read_argv(document, origin)
    if isinstance(document, dict) and KEYS & document.keys():
        return read_deepspeed(document, origin)
    raise InputError(f"{origin} is no configuration that is known: {_REMEDY}")
