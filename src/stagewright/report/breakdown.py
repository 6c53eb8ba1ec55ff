"""A breakdown of the time of one microbatch as a table and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from stagewright.estimation.breakdown import Share
from stagewright.report.tables import byte_unit, figure, table, time_unit
from stagewright.units import GIGA


def breakdown_document(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """One object per row: seconds, FLOP and bytes of one microbatch."""
    return [asdict(share) for share in shares]


def breakdown_table(shares: Sequence[Share], by: str) -> Table:
    """One row per share, and how much of all time it is."""
    total = sum(share.seconds for share in shares) or 1.0
    time_name, time_size = time_unit(share.seconds for share in shares)
    byte_name, byte_size = byte_unit(share.bytes_moved for share in shares)
    rows = [
        (
            share.name,
            share.num_calls,
            figure(share.forward_s, time_size),
            figure(share.backward_s, time_size),
            f"{share.seconds / total:.1%}",
            figure(share.flop, GIGA),
            figure(share.bytes_moved, byte_size),
        )
        for share in shares
    ]
    headings = (by, "calls", f"forward\n{time_name}", f"backward\n{time_name}", "share", "GFLOP", byte_name)
    return table("One microbatch through the whole model", headings, rows)
