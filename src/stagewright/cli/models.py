"""`stagewright models`: the configurations that ship with Stagewright."""

from __future__ import annotations

import typer

from stagewright.cli.options import Json
from stagewright.cli.output import print_document


def models(as_json: Json = False) -> None:
    """List the bundled model configurations."""
    from stagewright.tracing.models.reference import bundled_names

    names = bundled_names()
    if as_json:
        print_document({"models": names})
    else:
        typer.echo("\n".join(names))
