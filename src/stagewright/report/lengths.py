"""What steps of several lengths take under one plan."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from stagewright.planning.plan import Plan
from stagewright.report.tables import byte_unit, figure, table
from stagewright.units import format_seconds


def lengths_tables(plan: Plan) -> list[Table]:
    """A row for each length; no table where all batches have one."""
    if not plan.shorter_lengths:
        return []
    shares = plan.job.shares
    ranks = (rank for one in plan.by_length.values() for rank in one.ranks)
    unit, size = byte_unit(rank.reserved_peak_bytes for rank in ranks)
    rows = [
        (
            length,
            f"{shares[length]:.0%}",
            format_seconds(one.step_seconds),
            f"{one.tokens_per_second:,.0f}",
            *(figure(rank.reserved_peak_bytes, size) for rank in one.ranks),
        )
        for length, one in plan.by_length.items()
    ]
    headings = ("tokens", "of steps", "step", "tokens/s", *(f"rank {rank}" for rank in range(plan.pp)))
    title = f"By length: mean step {format_seconds(plan.mean_step_seconds)}, peaks in {unit}"
    return [table(title, headings, rows)]


def lengths_document(plan: Plan) -> list[dict[str, Any]]:
    """The same for `--json`."""
    if not plan.shorter_lengths:
        return []
    shares = plan.job.shares
    return [
        {
            "sequence_length": length,
            "share": shares[length],
            "step_seconds": one.step_seconds,
            "tokens_per_second": one.tokens_per_second,
            "reserved_peak_bytes": [rank.reserved_peak_bytes for rank in one.ranks],
        }
        for length, one in plan.by_length.items()
    ]
