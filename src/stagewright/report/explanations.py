"""Why a plan takes what it takes, as tables and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stagewright.planning.explanation import Change, Explanation
from stagewright.report.tables import Table, figure, table, time_unit
from stagewright.units import format_seconds


def explanation_document(found: Explanation) -> dict[str, Any]:
    """For `--json`."""
    return asdict(found)


def path_line(found: Explanation, num_ranks: int) -> str:
    """What the table of parts is of."""
    on = f" Of its computations {found.slowest_share:.0%} are on rank {found.slowest_rank}." * (num_ranks > 1)
    return f"The end of a step of {format_seconds(found.seconds)} waits for these, one after the other.{on}"


def parts_table(found: Explanation) -> Table:
    """What each second of the step is."""
    unit, size = time_unit(part.seconds for part in found.parts)
    rows = [
        (part.what, part.count or None, figure(part.seconds, size), f"{part.seconds / found.seconds:.1%}")
        for part in found.parts
    ]
    return table("Critical path", ("what", "number", unit, "of the step"), rows)


def changes_table(found: Explanation) -> Table:
    """What would shorten the step, one thing at a time."""
    return _table("What would gain", found.changes, found.seconds)


def errors_table(found: Explanation) -> Table:
    """What errors of the estimate would make of the step, one at a time."""
    return _table("If the estimate is wrong", found.errors, found.seconds)


def _table(title: str, changes: Sequence[Change], seconds: float) -> Table:
    rows = [
        (change.what, change.note, format_seconds(change.seconds), f"{change.seconds / seconds - 1:+.1%}")
        for change in changes
    ]
    return table(title, ("what", "", "step", "change"), rows, text=2)
