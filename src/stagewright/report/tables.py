"""Tables for the terminal: headings over left-aligned text and right-aligned figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from stagewright.units import GIB, MIB, MILLI


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> Table:
    """A table whose first `text` columns are text and whose others are figures.

    None and empty cells stay blank. Where the terminal is too narrow, headings and texts are folded, figures
    are not.
    """
    built = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    for index, heading in enumerate(headings):
        if index < text:
            built.add_column(heading, overflow="fold")
        else:
            longest = max((len(row[index]) for row in cells), default=0)
            built.add_column(heading, justify="right", overflow="fold", min_width=longest)
    for row in cells:
        built.add_row(*row)
    return built


def byte_unit(counts: Iterable[float]) -> tuple[str, float]:
    """Name and size of the unit in which all of `counts` are short to write.

    >>> byte_unit([5 * 2**30, 2**20]), byte_unit([2**20])
    (('GiB', 1073741824), ('MiB', 1048576))
    """
    return ("GiB", GIB) if max(counts, default=0) >= GIB else ("MiB", MIB)


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Name and size of the unit in which all of `seconds` are short to write.

    >>> time_unit([12.0, 0.3]), time_unit([0.012])
    (('s', 1.0), ('ms', 0.001))
    """
    return ("s", 1.0) if max(seconds, default=0) >= 1 else ("ms", MILLI)


def figure(amount: float, size: float) -> str:
    """`amount` in units of `size`, with three digits or more; blank for nothing.

    >>> figure(3 * 2**30, 2**30), figure(0.0123, 0.001), figure(123456, 100), figure(0, 1)
    ('3.00', '12.3', '1235', '')
    """
    value = amount / size
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}" if amount else ""


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    built = Table.grid(padding=(0, 2))
    built.add_column(style="bold")
    built.add_column()
    for name, value in pairs:
        built.add_row(name, str(value))
    return built


def numbered(
    rows: Iterable[tuple[Any, ...]], alike: Callable[[tuple[Any, ...]], object] = lambda row: row
) -> list[tuple[Any, ...]]:
    """Rows with their numbers in front; neighbours that are `alike` are one.

    >>> numbered([("a", 1), ("a", 1), ("b", 2)])
    [('0-1', 'a', 1), ('2', 'b', 2)]
    """
    found: list[tuple[Any, ...]] = []
    for _, group in groupby(enumerate(rows), key=lambda pair: alike(pair[1])):
        (first, row), *others = group
        found.append((f"{first}-{others[-1][0]}" if others else str(first), *row))
    return found


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """
    >>> plural(1, "tensor"), plural(2, "tensor"), plural(2, "microbatch", "microbatches")
    ('1 tensor', '2 tensors', '2 microbatches')
    """
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"
