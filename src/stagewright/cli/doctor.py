"""`stagewright doctor`: what this machine offers to runs, what will not work on it, and how to fix that."""

from __future__ import annotations

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show


def doctor(as_json: Json = False) -> None:
    """Check this machine for problems.

    Shows devices, links, versions and free memory. Exit code 1 if there is a problem that would make a run fail.

    Example:
        stagewright doctor
    """
    from stagewright.execution.examination import examine

    examination = examine()
    if as_json:
        print_document(examination.document())
    else:
        from stagewright.report.tables import facts

        show(facts(examination.facts), "")
        for trouble in examination.troubles:
            show(f"{'will not work' if trouble.is_fatal else 'note'}: {trouble.what}. {trouble.remedy}.")
        if not examination.troubles:
            show("No problems found.")
    if any(trouble.is_fatal for trouble in examination.troubles):
        raise typer.Exit(1)
