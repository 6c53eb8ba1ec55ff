"""Explanations of a plan's step time, as tables and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stagewright.planning.explanation import Change, Explanation
from stagewright.report.tables import Table, figure, table, time_unit
from stagewright.units import format_seconds


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """Return the document of `--json`."""
    return asdict(explanation)


def path_line(explanation: Explanation, num_ranks: int) -> str:
    """Return the heading of the table of parts."""
    on = f" Of its computations {explanation.slowest_share:.0%} are on rank {explanation.slowest_rank}." * (
        num_ranks > 1
    )
    return f"Critical path of the {format_seconds(explanation.seconds)} step.{on}"


def parts_table(explanation: Explanation) -> Table:
    """Return the parts of the critical path of the step."""
    unit, size = time_unit(part.seconds for part in explanation.parts)
    rows = [
        (
            part.what,
            part.count or None,
            figure(part.seconds, size),
            f"{part.seconds / explanation.seconds:.1%}",
        )
        for part in explanation.parts
    ]
    return table("", ("what", "number", unit, "of the step"), rows)


def changes_table(explanation: Explanation) -> Table:
    """Return the changes that would shorten the step, one at a time."""
    return _table("What would make it faster", explanation.changes, explanation.seconds)


def errors_table(explanation: Explanation) -> Table:
    """Return the effects of errors of the estimate on the step, one at a time."""
    return _table("If the estimate is wrong", explanation.errors, explanation.seconds)


def _table(title: str, changes: Sequence[Change], seconds: float) -> Table:
    rows = [
        (change.what, change.note, format_seconds(change.seconds), f"{change.seconds / seconds - 1:+.1%}")
        for change in changes
    ]
    return table(title, ("what", "", "step", "change"), rows, text=2)
