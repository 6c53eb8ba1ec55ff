"""Tables for the terminal: headings over left-aligned text and right-aligned figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> Table:
    """A table whose first `text` columns are text and whose others are figures.

    None and empty cells stay blank.
    """
    built = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        built.add_column(heading, justify="left" if index < text else "right", no_wrap=index >= text)
    for row in rows:
        built.add_row(*("" if cell is None else str(cell) for cell in row))
    return built


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    built = Table.grid(padding=(0, 2))
    built.add_column(style="bold")
    built.add_column()
    for name, value in pairs:
        built.add_row(name, str(value))
    return built


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "tensor"), plural(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
