"""A timeline in figures: as the document of `schedule` and `simulate`, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from stagewright.report.tables import table
from stagewright.schedule import Program
from stagewright.simulation import StageCosts, Timeline, simulate
from stagewright.simulation.costs import Transfers
from stagewright.units import format_bytes, format_seconds


def peak_activations(program: Program, costs: StageCosts, transfer_s: Transfers = 0.0) -> list[int]:
    """Per rank the most microbatches, summed over its stages, whose activations are held at one time."""
    counted = StageCosts.of(
        costs.forward_s,
        costs.input_grad_s,
        costs.weight_grad_s,
        backward_s=costs.backward_s,
        recompute_s=costs.recompute_s,
        saved_bytes=1,
    )
    return [int(count) for count in simulate(program, counted, transfer_s).peak_bytes]


def timeline_document(program: Program, timeline: Timeline, activations: Sequence[int]) -> dict[str, Any]:
    """What a program takes when simulated; seconds and bytes."""
    return {
        "name": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "rank_of_stage": list(program.placement.rank_of_stage),
        "makespan_seconds": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "program": [[str(action) for action in actions] for actions in program.ranks],
        "ranks": [
            {
                "rank": rank,
                "stages": list(program.placement.stages_of(rank)),
                "busy_seconds": float(timeline.busy_s[rank]),
                "idle_seconds": float(timeline.idle_s[rank]),
                "peak_activations": activations[rank],
                "peak_bytes": float(timeline.peak_bytes[rank]),
            }
            for rank in range(program.num_ranks)
        ],
    }


def heading(document: dict[str, Any]) -> str:
    """One line that says how good the program is."""
    stages = "" if document["num_stages"] == document["num_ranks"] else f", {document['num_stages']} stages"
    size = f"{document['num_ranks']} ranks{stages}, {document['num_microbatches']} microbatches"
    time = format_seconds(document["makespan_seconds"])
    return f"{document['name']}: {size}, {time}, bubble {document['bubble_fraction']:.1%}"


def rank_table(document: dict[str, Any]) -> Table:
    """Busy and idle time and the peaks of every rank."""
    rows = [
        (
            rank["rank"],
            ", ".join(map(str, rank["stages"])),
            format_seconds(rank["busy_seconds"]),
            format_seconds(rank["idle_seconds"]),
            rank["peak_activations"],
            format_bytes(rank["peak_bytes"]) if rank["peak_bytes"] else None,
        )
        for rank in document["ranks"]
    ]
    headings = ("rank", "stages", "busy", "idle", "peak activations", "peak memory")
    return table("", headings, rows, text=2)
