"""The console that results are printed on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH_OF_A_FILE = 256
"""Columns where there is no terminal: wide enough that no table is folded."""


def stdout() -> Console:
    """Standard output: coloured on a terminal, plain and wide where it goes to a file or another program."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH_OF_A_FILE
    return Console(width=width, highlight=False, soft_wrap=False)
