"""The console that results are printed on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from stagewright.text import printable

_WIDTH_OF_A_FILE = 256
"""Columns where there is no terminal: wide enough that no table is folded."""


class _Plain(Console):
    """Shows text of others as it is: no style or link that it asks for, and codes of what a terminal would obey."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Of lines, cells and titles, before their room is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Of all that is printed, whatever has made it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout() -> Console:
    """Standard output: coloured on a terminal, plain and wide where it goes to a file or another program."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH_OF_A_FILE
    return _Plain(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)
