"""The memory of a configuration of Megatron as a table and as a document."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from stagewright.planning.megatron import MegatronFootprint
from stagewright.report.tables import byte_unit, figure, table
from stagewright.units import format_bytes


def footprint_heading(found: MegatronFootprint) -> str:
    """The configuration, and whether its fullest rank fits."""
    layout = found.layout
    fullest = max(rank.peak_bytes for rank in found.ranks)
    limit = format_bytes(found.usable_bytes)
    verdict = (
        "fits" if found.fits else f"does not fit: {format_bytes(fullest - found.usable_bytes)} too much for"
    )
    return (
        f"{found.model} on {found.cluster} under {found.stack}: tp {layout.tp} x pp {layout.pp} x dp {layout.dp}, "
        f"cp {layout.cp}, ep {layout.ep}, {layout.schedule}, {layout.num_microbatches} microbatches of "
        f"{layout.microbatch_size}, recompute {layout.recompute}\n"
        f"allocated peak {format_bytes(fullest)}, {verdict} {limit} (memory only; this stack's time is not predicted)"
    )


def footprint_table(found: MegatronFootprint) -> Table:
    """Each pipeline rank's bytes by category at its peak."""
    categories = list(found.ranks[0].categories)
    unit, size = byte_unit(rank.peak_bytes for rank in found.ranks)
    rows = [
        (
            rank.rank,
            *(figure(rank.categories[name], size) for name in categories),
            figure(rank.peak_bytes, size),
            rank.at,
        )
        for rank in found.ranks
    ]
    headings = ("rank", *categories, "allocated", "at")
    return table(f"Memory of one device of each pipeline rank at its peak, in {unit}", headings, rows)


def footprint_document(found: MegatronFootprint) -> dict[str, Any]:
    """Everything of the table, in bytes."""
    layout = found.layout
    return {
        "stack": found.stack,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "cp": layout.cp,
        "ep": layout.ep,
        "schedule": layout.schedule,
        "num_chunks": layout.num_chunks,
        "microbatch_size": layout.microbatch_size,
        "num_microbatches": layout.num_microbatches,
        "recompute": layout.recompute,
        "fits": found.fits,
        "usable_bytes": found.usable_bytes,
        "ranks": [
            {
                "rank": rank.rank,
                "num_parameters": rank.num_parameters,
                "allocated_peak_bytes": rank.peak_bytes,
                "categories": rank.categories,
                "peak_at": rank.at,
            }
            for rank in found.ranks
        ],
    }
