"""Console for results."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from stagewright.text import printable

_WIDTH_OF_A_FILE = 256
"""Columns without a terminal: wide enough that no table is wrapped."""

_COMMAND = re.compile(r"`[^`\n]+`")
_UNBROKEN = "\u2800"
"""A non-breaking blank, used while lines are wrapped."""


class _Plain(Console):
    """A console that prints untrusted text literally: without markup, and with control characters escaped. Lines are wrapped
    only between words, and not within commands in backticks."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"no_wrap": True, "overflow": "ignore", "crop": False} | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Wrap and escape lines, cells and titles before they are measured."""
        lines = (_wrapped(line, self.width) for line in printable(text).split("\n"))
        return super().render_str("\n".join(lines), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape all printed text."""
        for segment in super().render(renderable, options):
            text = segment.text.replace(_UNBROKEN, " ")
            yield segment if segment.control else segment._replace(text=printable(text))


def _wrapped(line: str, width: int) -> str:
    """Wrap a line between words, but not within commands in backticks.

    >>> print(_wrapped("  Wrote it. `run it` trains.", 12).replace(_UNBROKEN, " "))
      Wrote it.
      `run it`
      trains.
    """
    if len(line) <= width:
        return line
    kept = _COMMAND.sub(lambda command: command[0].replace(" ", _UNBROKEN), line)
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def stdout() -> Console:
    """Return the console of standard output: coloured on a terminal, plain and wide for a file or another program."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH_OF_A_FILE
    return _Plain(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)
