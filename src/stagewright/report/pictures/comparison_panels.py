"""Panels of the page that compares predicted and measured timelines of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagewright.report.comparison import in_words, kind_in_words, step_rows
from stagewright.report.pictures.panels import Cell, Column, Figure, Panels, PanelTable
from stagewright.report.runs import ERROR, machine_lines

_PAIR = ("predicted", "measured")


def comparison_panels(document: dict[str, Any], title: str) -> Panels:
    """Return the panels for the `document` of a comparison."""
    step, bubble = document["step_seconds"], document["bubble_fraction"]
    figures = (
        Figure("step predicted", step["predicted"], "s"),
        Figure("step measured", step["measured"], "s"),
        Figure(ERROR, step["measured"] / (step["predicted"] or step["measured"] or 1.0) - 1, "%"),
        Figure("bubble predicted", bubble["predicted"], "%"),
        Figure("bubble measured", bubble["measured"], "%"),
    )  # fmt: skip
    times = _table("times", "Predicted and measured", ("what",), "s", _times(document))
    peaks = _table("peaks", "Allocated memory at the peak", ("rank",), "B", _peaks(document))
    tables = tuple(table for table in (times, peaks) if table.rows)
    slowdown = document["machine_slowdown"]
    answer = "\n".join([in_words(document), *machine_lines(slowdown, [slowdown or 1.0])])
    return Panels(f"{title}: {document['schedule']}, predicted and measured", answer, figures, tables)


def _table(
    key: str, title: str, named: tuple[str, ...], unit: str, rows: Iterator[tuple[Cell, ...]]
) -> PanelTable:
    columns = (
        *map(Column, named),
        *(Column(name, unit) for name in _PAIR),
        Column(ERROR, "%"),
    )
    return PanelTable(key, title, columns, tuple(rows))


def _times(document: dict[str, Any]) -> Iterator[tuple[Cell, ...]]:
    for name, pair in step_rows(document):
        yield _row(name, pair)
    for action in document["actions"]:
        yield _row(
            f"stage {action['stage']}: {kind_in_words(action['action'])}, each of {action['count']}",
            action["seconds"],
        )
    for rank in document["ranks"]:
        yield _row(f"rank {rank['rank']}: busy", rank["busy_seconds"])
        yield _row(f"rank {rank['rank']}: idle", rank["idle_seconds"])


def _peaks(document: dict[str, Any]) -> Iterator[tuple[Cell, ...]]:
    for rank in document["ranks"]:
        if rank["allocated_peak_bytes"]:
            yield _row(f"rank {rank['rank']}", rank["allocated_peak_bytes"])


def _row(name: str, pair: dict[str, float]) -> tuple[Cell, ...]:
    was, now = (pair[side] for side in _PAIR)
    return name, was, now, now / was - 1 if was else None
