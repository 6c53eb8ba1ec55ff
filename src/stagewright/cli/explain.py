"""`stagewright explain`: where the time of a plan's step goes, and what would change it."""

from __future__ import annotations

from stagewright.cli.options import Json, PlanFile
from stagewright.cli.output import print_document, show


def explain(plan: PlanFile, as_json: Json = False) -> None:
    """Explain where the time of a plan goes.

    Shows what each second of a step is spent on, what would make it faster, and what errors of the estimate would do.

    Example:
        stagewright explain plan.json
    """
    from stagewright.planning.explanation import explain as explained
    from stagewright.planning.plan import load_plan
    from stagewright.report.explanations import (
        changes_table,
        errors_table,
        explanation_document,
        parts_table,
        path_line,
    )
    from stagewright.report.plans import answer_line, estimate_heading, host_memory_line

    loaded = load_plan(plan)
    explanation = explained(loaded)
    if as_json:
        print_document(explanation_document(explanation))
        return
    show(estimate_heading(loaded))
    if loaded.predictions.ranks:
        show(*(line for line in (answer_line(loaded), host_memory_line(loaded)) if line is not None))
    show(
        "",
        path_line(explanation, loaded.pp),
        "",
        parts_table(explanation),
        changes_table(explanation),
        errors_table(explanation),
    )
