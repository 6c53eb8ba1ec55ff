"""Consent to run the code of factories that plans name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.errors import InputError
from stagewright.text import say

if TYPE_CHECKING:
    from stagewright.planning.plan import Plan

WithModel = Annotated[
    bool,
    typer.Option(
        "--with-model",
        help="Build the plan's model even if it or its optimizer is a factory, which runs its code.",
    ),
]


def allow_model(plan: Plan, with_model: bool, what: str) -> None:
    """Allow the model and the optimizer of `plan` to be built for `what`, and print which code that runs.

    Raises:
        InputError: one of them is a factory and `with_model` was not given.
    """
    if plan.code and not with_model:
        raise InputError(
            f"{what} needs the model, and building it runs {' and '.join(plan.code)}: review that code, then allow "
            "it with --with-model"
        )
    for text in plan.code:
        say_what_runs(text)


def say_what_runs(model: str) -> None:
    """Print on stderr which code building `model` runs, if it is a factory."""
    from stagewright.tracing.models.source import factory_file, split_factory

    if split_factory(model) is None:
        return
    file = factory_file(model)
    is_here = file is None or file.is_relative_to(Path.cwd().resolve())
    say(f"runs {model}" + ("" if is_here else f", in {file}, outside this folder"))
