"""`stagewright compare`: a plan's predictions against the measurements of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.options import Json, PlanFile, PlannedCluster, warn
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.pictures import Html
from stagewright.cli.progress import Progress
from stagewright.files import write_whole


def compare(
    plan: PlanFile,
    record: Annotated[
        Path, typer.Argument(metavar="RECORD", help="The record.json that `stagewright run` wrote.")
    ],
    cluster: PlannedCluster = None,
    html: Html = None,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:
    """Compare a plan's predictions with a run's record.

    No code of its model runs unless --with-model allows it.

    Example:
        stagewright compare plan.json runs/llama/record.json
    """
    from stagewright.api import compare as compared
    from stagewright.report.comparison import both_pictures, comparison_table, in_words
    from stagewright.report.runs import machine_lines

    check_writable(html)
    with Progress(f"simulating {plan}") as progress:
        comparison = compared(
            plan,
            record,
            cluster,
            allow=lambda loaded, what: allow_model(loaded, with_model, what),
            report=progress,
        )
    warn(comparison.warnings)
    if html is not None:
        write_whole(html, comparison.page())
    if as_json:
        print_document(comparison.document)
        return
    from stagewright.report.console import stdout

    console = stdout()
    pictures = both_pictures(comparison.predicted, comparison.measured, console.width, console.is_terminal)
    ratios = [ratio for rank in comparison.record.ranks for ratio in comparison.record.slowdowns(rank)]
    slowdown_lines = machine_lines(comparison.record.slowdown, ratios)
    show(comparison_table(comparison.document), *pictures, "", in_words(comparison.document), *slowdown_lines)
