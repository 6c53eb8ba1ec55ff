"""Output of verbs: tables or one JSON document on stdout, and checks of the files to write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import InputError
from stagewright.files import check_target

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stagewright.simulation import Timeline


def print_document(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def show(*parts: RenderableType) -> None:
    """Print text and tables on stdout."""
    from stagewright.report.console import stdout

    console = stdout()
    for part in parts:
        console.print(part)


def copied(text: str) -> RenderableType:
    """Return text to be copied into a shell or a file, with its lines unchanged."""
    from rich.text import Text

    return Text(text)


def timetable(timeline: Timeline) -> list[RenderableType]:
    """Return the timetable of `timeline` as stdout can show it."""
    from stagewright.report.console import stdout
    from stagewright.report.timelines import picture

    console = stdout()
    return [*picture(timeline, console.width, console.is_terminal)]


def check_writable(path: Path | None) -> None:
    """Check that a path can be written, before work that would be lost.

    Raises:
        InputError: the folder is missing or read-only, or `path` is a folder, a link or a device.
    """
    if path is None:
        return
    check_target(path)
    if not path.parent.is_dir():
        raise InputError(
            f"cannot write '{path}': there is no folder '{path.parent}'; create it or name another"
        )
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write '{path}': the folder '{path.parent}' is read-only; name another")
