"""A timeline in figures: as the document of `schedule` and `simulate`, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from stagewright.report.tables import table
from stagewright.schedule import Action, Kind, Program
from stagewright.simulation import Timeline
from stagewright.units import format_bytes, format_seconds


def peak_activations(program: Program) -> list[int]:
    """Per rank the most forwards, over its stages, whose backward is not yet done.

    >>> from stagewright.schedule import build
    >>> peak_activations(build("1f1b", 4, 8)), peak_activations(build("zb-v", 2, 6))
    ([4, 3, 2, 1], [4, 4])
    """
    return [_peak(actions) for actions in program.ranks]


def _peak(actions: Iterable[Action]) -> int:
    held = most = 0
    for part in (part for action in actions for part in action.parts):
        held += (part.kind is Kind.F) - (part.kind in (Kind.B, Kind.W))
        most = max(most, held)
    return most


def timeline_document(
    program: Program, timeline: Timeline, peak_bytes: Sequence[float] | None = None
) -> dict[str, Any]:
    """What a program takes when simulated, in seconds and bytes; `peak_bytes` where they are known better."""
    peaks = timeline.peak_bytes if peak_bytes is None else peak_bytes
    activations = peak_activations(program)
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
                "peak_bytes": float(peaks[rank]),
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
