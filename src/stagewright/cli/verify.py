"""`stagewright verify`: checks that a plan trains the user's model as plain PyTorch does."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.errors import InputError
from stagewright.text import plural

if TYPE_CHECKING:
    from stagewright.execution.verification import Verification


def verify(
    subject: Annotated[
        str,
        typer.Argument(metavar="PLAN|MODEL", help="A plan.json; or a model, with a plan for it in --plan."),
    ],
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="A plan.json for the model.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the copy; default: one per stage, at least two.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (one GPU per rank) or auto: GPUs if the plan is for them.")
    ] = "auto",
    no_compare: Annotated[
        bool,
        typer.Option(
            "--no-compare",
            help="Compare only the reduced copy with its traced graph, not first the whole model.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Verify that pipelined training equals plain training.

    Trains one batch of a reduced copy of the model both ways. Exit code 1 if the loss or a gradient differs by more than
    rounding explains.

    Example:
        stagewright verify plan.json
    """
    from stagewright.planning.plan import load_plan

    if plan is None and not Path(subject).is_file():
        raise InputError(
            f"'{subject}' is no file: give a plan.json, or with --plan one that is for the model '{subject}'"
        )
    loaded = load_plan(Path(subject) if plan is None else plan)
    model = loaded.model.text if plan is None else subject
    say_what_runs(model)
    say_what_runs(loaded.job.optimizer)
    with Progress("importing torch") as progress:
        from stagewright.execution import verification

        result = verification.verify(model, loaded, layers, progress, device, not no_compare)
    if as_json:
        print_document(_document(result))
    else:
        show(*_lines(result))
    if not result.holds:
        raise typer.Exit(1)


def _document(verification: Verification) -> dict[str, Any]:
    """Return the JSON document, with None for NaN and infinity, which JSON cannot write."""
    return {"equal": verification.holds} | {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(verification).items()
    }


def _lines(verification: Verification) -> list[str]:
    layers = plural(verification.num_layers, "layer") if verification.num_layers else "as it is"
    verdict = (
        "Pipelined equals plain." if verification.holds else "Pipelined is NOT equal to plain: the plan cannot be trusted."
    )  # fmt: skip
    length = (
        f", {verification.sequence_length} tokens a sample: " if verification.sequence_length > 1 else ": "
    )
    worst = f", largest difference {verification.gradient_difference:.1e} in {verification.worst_parameter}"
    return [
        f"{verification.model}, {layers}, {verification.num_parameters:,} parameters, {verification.dtype}"
        f"{length}{verification.schedule} with {plural(verification.num_stages, 'stage')} on "
        f"{verification.num_ranks * verification.num_replicas} {'processes' if verification.device == 'cpu' else 'GPUs'}"
        + (f" ({verification.num_replicas} replicas)" if verification.num_replicas > 1 else "")
        + f" against {'one process' if verification.device == 'cpu' else 'one GPU'}",
        f"loss {verification.loss:.6f}, largest difference {verification.loss_difference:.1e}",
        f"{verification.num_gradients} gradients, {verification.num_equal_gradients} of them equal to the last bit"
        + (worst if verification.num_equal_gradients < verification.num_gradients else ""),
        f"(differences relative to the largest element; rounding explains {verification.tolerance:.0e})",
        verdict,
    ]
