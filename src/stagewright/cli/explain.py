"""`stagewright explain`: why a plan takes what it takes, and what would change that."""

from __future__ import annotations

from typing import Annotated

import typer

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.options import Json, PlanFile
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress

Search = Annotated[
    bool, typer.Option("--search", help="Search for plans with more memory, links and samples.")
]


def explain(
    plan: PlanFile,
    search: Search = False,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:
    """Explain why a plan takes what it takes.

    What each second of its step is, what would gain most, and what errors of the estimate would do.

    Example:
        stagewright explain plan.json
    """
    from stagewright.planning.explanation import explain as explained
    from stagewright.planning.plan import load_plan
    from stagewright.planning.what_if import searched
    from stagewright.report.explanations import (
        changes_table,
        errors_table,
        explanation_document,
        parts_table,
        path_line,
        searched_table,
    )
    from stagewright.report.plans import answer_line, estimate_heading

    loaded = load_plan(plan)
    if search:
        allow_model(loaded, with_model, "a search")
    found = explained(loaded)
    others = ()
    if search:
        with Progress("searching") as progress:
            others = searched(loaded, progress)
    if as_json:
        document = explanation_document(found)
        if search:
            document["searched"] = [vars(other) for other in others]
        print_document(document)
        return
    show(estimate_heading(loaded))
    if loaded.predictions.ranks:
        show(answer_line(loaded))
    show("", path_line(found, loaded.pp), "", parts_table(found), changes_table(found), errors_table(found))
    if others:
        show(searched_table(others))
