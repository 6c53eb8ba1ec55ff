"""Plans name models, and a factory is code: what builds one says so, and verbs that only judge ask first."""

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
        help="Build the plan's model even if it or the optimizer is a factory, whose code that runs.",
    ),
]


def allow_model(plan: Plan, with_model: bool, what: str) -> None:
    """Lets the model of `plan` be built, and its optimizer; says which code that runs. Raises `InputError` where one of them
    is a factory, and `with_model` was not given; `what` needs it."""
    if plan.code and not with_model:
        raise InputError(
            f"{what} needs the model, and building it runs {' and '.join(plan.code)}: look at that code, and allow it "
            "with --with-model"
        )
    for text in plan.code:
        say_what_runs(text)


def say_what_runs(model: str) -> None:
    """One line on stderr that names the code which building `model` runs; nothing for what is no factory."""
    from stagewright.tracing.models.source import factory_file, split_factory

    if split_factory(model) is None:
        return
    file = factory_file(model)
    is_here = file is None or file.is_relative_to(Path.cwd().resolve())
    say(f"runs {model}" + ("" if is_here else f", in {file}, outside this folder"))
