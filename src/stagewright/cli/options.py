"""Arguments and options that several verbs share, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stagewright.documents import parse_json_or_text
from stagewright.errors import InputError, nearest

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled name (`stagewright models`), config.json, Hugging Face directory or id, or "
        "package.module:factory.",
    ),
]

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `stagewright plan` wrote.")]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the model's configuration; repeatable."),
]

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the result.")
]

SequenceLength = Annotated[int, typer.Option("--sequence-length", min=1, help="Tokens per sample.")]

MicrobatchSize = Annotated[int, typer.Option("--microbatch", min=1, help="Samples per microbatch.")]


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """Overrides from ``key=value``; a value is read as JSON where it is JSON, else as text.

    Raises:
        InputError: a text without an equals sign, or a value such as NaN.

    >>> parse_settings(["num_hidden_layers=2", "hidden_act=gelu", "tie_word_embeddings=true"])
    {'num_hidden_layers': 2, 'hidden_act': 'gelu', 'tie_word_embeddings': True}
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {text}: write KEY=VALUE, e.g. --set num_hidden_layers=4")
        found[key.strip()] = parse_json_or_text(value, f"--set {key.strip()}")
    return found


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def torch_dtype(text: str) -> str:
    """The name of a precision as the graph writes it.

    Raises:
        InputError: an unknown precision; names the nearest.

    >>> torch_dtype("bf16"), torch_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = _DTYPES.get(text.lower(), text.lower())
    if name not in _DTYPES.values():
        known = [*_DTYPES, *_DTYPES.values()]
        raise InputError(f"unknown precision '{text}'{nearest(text, known)}: one of {', '.join(_DTYPES)}")
    return name
