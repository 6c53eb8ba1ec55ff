"""What steps of several lengths take under one plan."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from stagewright.planning.plan import Plan
from stagewright.report.tables import byte_unit, figure, table
from stagewright.units import format_seconds


def lengths_tables(plan: Plan) -> list[Table]:
    """A row for each length; no table where all batches have one."""
    if not plan.lengths:
        return []
    unit, size = byte_unit(rank.reserved_peak_bytes for one in plan.lengths for rank in one.predictions.ranks)
    rows = [
        (
            one.sequence_length,
            f"{one.share:.0%}",
            format_seconds(one.predictions.step_seconds),
            f"{one.predictions.tokens_per_second:,.0f}",
            *(figure(rank.reserved_peak_bytes, size) for rank in one.predictions.ranks),
        )
        for one in plan.lengths
    ]
    headings = ("tokens", "of steps", "step", "tokens/s", *(f"rank {rank}" for rank in range(plan.pp)))
    title = f"By length: mean step {format_seconds(plan.mean_step_seconds)}, peaks in {unit}"
    return [table(title, headings, rows)]


def lengths_document(plan: Plan) -> list[dict[str, Any]]:
    """The same for `--json`."""
    return [
        {
            "sequence_length": one.sequence_length,
            "share": one.share,
            "step_seconds": one.predictions.step_seconds,
            "reserved_peak_bytes": [rank.reserved_peak_bytes for rank in one.predictions.ranks],
        }
        for one in plan.lengths
    ]
