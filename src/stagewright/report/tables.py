"""Tables for the terminal: headings over left-aligned text and right-aligned figures, fitted to the width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from stagewright.text import printable
from stagewright.units import GIB, MIB, MILLI

_EDGES = 2
"""Margin columns of a table with headings."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: a heading and cells, which are all text or all figures."""

    heading: str
    cells: tuple[str, ...]
    is_text: bool

    @property
    def natural(self) -> int:
        """Width without wrapping."""
        lines = (line for text in (self.heading, *self.cells) for line in text.splitlines())
        return max(map(cell_len, lines), default=0)

    @property
    def least(self) -> int:
        """Width with headings and texts wrapped between all words."""
        whole = [] if self.is_text else self.cells
        words = (word for text in (self.heading, *self.cells * self.is_text) for word in text.split())
        return max(map(cell_len, (*whole, *words)), default=0)


@dataclass(frozen=True)
class Table:
    """A table that adapts to the width of the terminal: headings and texts are wrapped between words, then gaps are reduced,
    then the table is printed in several blocks, each with the first column. Words and figures are never broken.
    """

    title: str
    columns: tuple[TableColumn, ...]
    max_width: int | None = None
    """Columns to fit into, if the terminal is wider."""

    @property
    def has_headings(self) -> bool:
        """Whether any column has a heading; tables of names and values have none."""
        return any(column.heading for column in self.columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        width = min(options.max_width, self.max_width or options.max_width)
        for columns, gap in self._blocks(width):
            widths = fitted(columns, self._available(columns, gap, width))
            built = self._built(columns, widths or [column.least for column in columns], gap)
            yield from console.render(built, options.update_width(max(width, _width(built))))

    def _blocks(self, max_width: int) -> list[tuple[Sequence[TableColumn], int]]:
        """Return the columns of every block, and the gap between them."""
        for gap in (2, 1):
            if fitted(self.columns, self._available(self.columns, gap, max_width)) is not None:
                return [(self.columns, gap)]
        first, *further = self.columns
        blocks = [[first]]
        for column in further:
            wider = [*blocks[-1], column]
            if len(wider) > 2 and fitted(wider, self._available(wider, 1, max_width)) is None:
                blocks.append([first, column])
            else:
                blocks[-1] = wider
        return [(block, 1) for block in blocks]

    def _available(self, columns: Sequence[TableColumn], gap: int, max_width: int) -> int:
        return max_width - gap * (len(columns) - 1) - _EDGES * self.has_headings

    def _built(self, columns: Sequence[TableColumn], widths: Sequence[int], gap: int) -> RichTable:
        built = RichTable(
            box=box.SIMPLE_HEAD if self.has_headings else None,
            show_header=self.has_headings,
            pad_edge=False,
            padding=(0, gap - self.has_headings, 0, 0),
        )
        for column, width in zip(columns, widths, strict=True):
            style = "" if self.has_headings or column is not columns[0] else "bold"
            justify = "left" if column.is_text else "right"
            built.add_column(Text(column.heading), justify=justify, width=width, style=style, overflow="fold")
        for row in zip(*(column.cells for column in columns), strict=True):
            built.add_row(*map(Text, row))
        return built


def _width(built: RichTable) -> int:
    """Return an upper bound on the width."""
    return sum((column.width or 0) + 2 for column in built.columns) + _EDGES


def fitted(columns: Sequence[TableColumn], max_width: int) -> list[int] | None:
    """Fit columns into `max_width`, wrapping the widest first; return their widths, or None if words would be broken.

    >>> columns = [TableColumn("what", ("a few words", "more"), True), TableColumn("bytes", ("12.5 GiB",), False)]
    >>> fitted(columns, 40), fitted(columns, 16), fitted(columns, 12)
    ([11, 8], [8, 8], None)
    """
    least, natural = [column.least for column in columns], [column.natural for column in columns]
    if sum(least) > max_width:
        return None
    most = max(natural, default=0)
    while (
        sum(widths := [max(low, min(high, most)) for low, high in zip(least, natural, strict=True)])
        > max_width
    ):
        most -= 1
    return widths


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> Table:
    """Return a table whose first `text` columns are text and whose others are figures. None and empty cells are blank;
    columns of figures that are blank in all rows are left out."""
    cells = [["" if cell is None else printable(str(cell)).strip() for cell in row] for row in rows]
    columns = [
        TableColumn(printable(heading), tuple(row[index] for row in cells), index < text)
        for index, heading in enumerate(headings)
    ]
    shown = tuple(column for column in columns if column.is_text or not cells or any(column.cells))
    return Table(printable(title), shown)


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values, one pair per line."""
    return table("", ("", ""), pairs, text=2)


def byte_unit(counts: Iterable[float]) -> tuple[str, float]:
    """Return name and size of a suitable unit for `counts` bytes.

    >>> byte_unit([5 * 2**30, 2**20]), byte_unit([2**20])
    (('GiB', 1073741824), ('MiB', 1048576))
    """
    return ("GiB", GIB) if max(counts, default=0) >= GIB else ("MiB", MIB)


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Return name and size of a suitable unit for `seconds`.

    >>> time_unit([12.0, 0.3]), time_unit([0.012])
    (('s', 1.0), ('ms', 0.001))
    """
    return ("s", 1.0) if max(seconds, default=0) >= 1 else ("ms", MILLI)


def figure(amount: float, size: float) -> str:
    """Format `amount` in units of `size`, with three digits or more; blank for zero.

    >>> figure(3 * 2**30, 2**30), figure(0.0123, 0.001), figure(123456, 100), figure(0, 1)
    ('3.00', '12.3', '1235', '')
    """
    value = amount / size
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}" if amount else ""


def numbered(
    rows: Iterable[tuple[Any, ...]], alike: Callable[[tuple[Any, ...]], object] = lambda row: row
) -> list[tuple[Any, ...]]:
    """Number rows; neighbours that are `alike` become one row.

    >>> numbered([("a", 1), ("a", 1), ("b", 2)])
    [('0-1', 'a', 1), ('2', 'b', 2)]
    """
    result: list[tuple[Any, ...]] = []
    for _, group in groupby(enumerate(rows), key=lambda pair: alike(pair[1])):
        (first, row), *further = group
        result.append((f"{first}-{further[-1][0]}" if further else str(first), *row))
    return result
