"""Rows of plain values as HTML for notebooks, and as pandas data frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from stagewright.errors import InputError
from stagewright.text import printable

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_ROWS = 60
"""Maximum rows in a notebook; a data frame has all."""


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a heading and a table, of at most the first 60 rows.

    >>> html_table("2 < 3", ["stage"], [[0]])
    '<p>2 &lt; 3</p><table><thead><tr><th>stage</th></tr></thead><tbody><tr><td>0</td></tr></tbody></table>'
    """
    all_rows = list(rows)
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in all_rows[:_MOST_ROWS]
    )
    more = f"<p>and {len(all_rows) - _MOST_ROWS} more rows</p>" if len(all_rows) > _MOST_ROWS else ""
    return f"<p>{_cell(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: Any) -> str:
    return escape(printable(f"{value:.6g}" if isinstance(value, float) else str(value)))


def data_frame(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> DataFrame:
    """Return a pandas data frame. Raises `InputError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise InputError("data frames need pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(list(rows), columns=list(columns))
