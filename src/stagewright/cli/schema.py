"""`stagewright schema`: the JSON schema of `plan.json`."""

from __future__ import annotations

from stagewright.cli.output import print_document


def schema() -> None:
    """Print the JSON schema of plan.json."""
    from stagewright.planning.plan import Plan

    print_document(Plan.json_schema())
