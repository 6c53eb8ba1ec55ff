"""`stagewright verify`: does a plan train the user's model as plain PyTorch would?"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.options import Json, Model
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress

if TYPE_CHECKING:
    from stagewright.execution.verification import Verification


def verify(
    model: Model,
    plan: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="A plan.json for this model.")],
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the copy; default one per stage, at least two.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (one GPU per rank) or auto: GPUs if the plan is for them.")
    ] = "auto",
    no_compare: Annotated[
        bool,
        typer.Option(
            "--no-compare",
            help="Do not compare the whole model with its traced graph first, only the reduced copy.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Verify that pipelined training equals plain training.

    Trains one batch of a reduced copy of the model both ways. Exit code 1 if the loss or a gradient differs by more than
    rounding explains.

    Example:
        stagewright verify llama-3-8b --plan plan.json
    """
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    say_what_runs(model)
    say_what_runs(loaded.job.optimizer)
    with Progress("importing torch") as progress:
        from stagewright.execution import verification

        found = verification.verify(model, loaded, layers, progress, device, not no_compare)
    if as_json:
        print_document(_document(found))
    else:
        show(*_lines(found))
    if not found.holds:
        raise typer.Exit(1)


def _document(found: Verification) -> dict[str, Any]:
    """None for what JSON cannot write: NaN and infinity."""
    return {"equal": found.holds} | {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found).items()
    }


def _lines(found: Verification) -> list[str]:
    layers = f"{found.num_layers} layers" if found.num_layers else "as it is"
    verdict = (
        "Pipelined equals plain." if found.holds else "Pipelined is NOT equal to plain: the plan cannot be trusted."
    )  # fmt: skip
    worst = f", largest difference {found.gradient_difference:.1e} in {found.worst_parameter}"
    return [
        f"{found.model}, {layers}, {found.num_parameters:,} parameters, {found.dtype}, "
        f"{found.sequence_length} tokens a sample: {found.schedule} with {found.num_stages} stages on "
        f"{found.num_ranks * found.num_replicas} {'processes' if found.device == 'cpu' else 'GPUs'}"
        + (f" ({found.num_replicas} replicas)" if found.num_replicas > 1 else "")
        + f" against {'one process' if found.device == 'cpu' else 'one GPU'}",
        f"loss {found.loss:.6f}, largest difference {found.loss_difference:.1e}",
        f"{found.num_gradients} gradients, {found.num_equal_gradients} of them equal to the last bit"
        + (worst if found.num_equal_gradients < found.num_gradients else ""),
        f"(differences relative to the largest element; rounding explains {found.tolerance:.0e})",
        verdict,
    ]
