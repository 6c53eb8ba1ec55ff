"""`stagewright doctor`: what this machine has for runs, what will not work on it, and how to mend that."""

from __future__ import annotations

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show


def doctor(as_json: Json = False) -> None:
    """Look at this machine: what will not work?

    Devices, links, versions, free memory. Exits with 1 where something is found that a run would fail of.

    Example:
        stagewright doctor
    """
    from stagewright.execution.examination import examine

    found = examine()
    if as_json:
        print_document(found.document())
    else:
        from stagewright.report.tables import facts

        show(facts(found.facts), "")
        for one in found.troubles:
            show(f"{'will not work' if one.is_fatal else 'note'}: {one.what}. {one.remedy}.")
        if not found.troubles:
            show("Nothing was found that a run would fail of.")
    if any(one.is_fatal for one in found.troubles):
        raise typer.Exit(1)
