"""Reports on a timeline: the document of `schedule` and `simulate`, a table of the ranks, and a timetable with one row of
text per rank, coloured on a terminal, in ASCII elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from stagewright.report.tables import Table, table
from stagewright.schedule import Program
from stagewright.schedule.action import COMPUTE, Action
from stagewright.schedule.in_flight import peak_activations
from stagewright.simulation import Timeline
from stagewright.text import plural
from stagewright.units import format_bytes, format_seconds


def timeline_document(
    program: Program, timeline: Timeline, peak_bytes: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the simulated seconds and bytes of a program; `peak_bytes` replace those of the timeline."""
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
    """Return a one-line summary of the program."""
    stages = "" if document["num_stages"] == document["num_ranks"] else f", {document['num_stages']} stages"
    microbatches = plural(document["num_microbatches"], "microbatch", "microbatches")
    size = f"{plural(document['num_ranks'], 'rank')}{stages}, {microbatches}"
    time = format_seconds(document["makespan_seconds"])
    return f"{document['name']}: {size}, {time}, bubble {document['bubble_fraction']:.1%}"


def rank_table(document: dict[str, Any]) -> Table:
    """Return busy and idle time and the peaks of every rank."""
    rows = [
        (
            rank["rank"], ", ".join(map(str, rank["stages"])),
            format_seconds(rank["busy_seconds"]), format_seconds(rank["idle_seconds"]),
            rank["peak_activations"], format_bytes(rank["peak_bytes"]) if rank["peak_bytes"] else None,
        )
        for rank in document["ranks"]
    ]  # fmt: skip
    headings = ("rank", "stages", "busy", "idle", "peak activations", "peak memory")
    return table("", headings, rows, text=2)


_SHADES = {"F": ("blue", "dark_blue"), "B": ("green", "dark_green"), "I": ("cyan", "dark_cyan"),
           "W": ("magenta", "dark_magenta"), "R": ("yellow", "dark_goldenrod")}  # fmt: skip
_IDLE = "."
_GAP = " ~ "
_LEAST_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A computation in the timetable: columns `start` to `stop` of its rank's row."""

    action: Action
    start: int
    stop: int


def picture(timeline: Timeline, width: int, colour: bool, fit_seconds: float | None = None) -> list[Text]:
    """Return the rows of all ranks and a time axis, at most `width` columns wide.

    The width follows from the label of the shortest computation; with colours two columns per computation are enough. If it
    does not fit, only the beginning and the end of the batch are shown, with ``~`` between them.

    With `fit_seconds` the scale is the one at which this time fits, regardless of labels, so that timelines can be compared
    line by line.
    """
    margin = len(f"rank {timeline.num_ranks - 1} ")
    num_columns = max(width - margin - 1, 16)
    scale = num_columns / fit_seconds if fit_seconds else _columns_per_second(timeline, num_columns, colour)
    columns, half = math.ceil(timeline.makespan_s * scale - 1e-9), (num_columns - len(_GAP)) // 2
    windows = [(0, columns)] if columns <= num_columns else [(0, half), (columns - half, columns)]
    rows = []
    for rank in range(timeline.num_ranks):
        computations = list(segments(timeline, rank, scale))
        row = Text(f"rank {rank} ".rjust(margin), no_wrap=True)
        row.append_text(
            Text(_GAP).join(_row(computations, window, _full(timeline), colour) for window in windows)
        )
        rows.append(row)
    return [*rows, _axis(timeline, windows, margin)]


def segments(timeline: Timeline, rank: int, columns_per_second: float) -> Iterator[Segment]:
    """Yield the computations of `rank` on a grid of columns; those that cover no column are left out."""
    for event in timeline.events(rank):
        if event.action.kind not in COMPUTE:
            continue
        start, stop = round(event.start_s * columns_per_second), round(event.end_s * columns_per_second)
        if stop > start:
            yield Segment(event.action, start, stop)


def label(action: Action, full: bool) -> str:
    """Return the label of a computation, with its stage if `full`.

    >>> label(Action.parse("2F0"), full=False), label(Action.parse("2F0"), full=True)
    ('F0', '2F0')
    """
    return str(action) if full else f"{action.kind}{action.microbatch}"


def _full(timeline: Timeline) -> bool:
    placement = timeline.encoded.placement
    return placement.num_stages > placement.num_ranks


def _columns_per_second(timeline: Timeline, num_columns: int, colour: bool) -> float:
    """Return the scale that gives the shortest computation a whole number of columns."""
    seconds = (timeline.end_s - timeline.start_s)[timeline.is_compute]
    if not (seconds > 0).any():
        return num_columns / timeline.makespan_s if timeline.makespan_s else 0.0
    shortest, full = float(seconds[seconds > 0].min()), _full(timeline)
    events = (event for rank in range(timeline.num_ranks) for event in timeline.events(rank))
    wanted = max(len(label(event.action, full)) for event in events) + 1
    fitting = int(num_columns / (timeline.makespan_s / shortest) + 1e-9)
    least = _LEAST_COLUMNS if colour else wanted
    return (min(wanted, fitting) if fitting >= least else wanted) / shortest


def _row(computations: list[Segment], window: tuple[int, int], full: bool, colour: bool) -> Text:
    """Return the part of a rank's row in `window`."""
    idle = " " if colour else _IDLE
    row, reached = Text(), window[0]
    for segment in computations:
        start, stop = max(segment.start, window[0]), min(segment.stop, window[1])
        if stop <= start:
            continue
        row.append(idle * (start - reached))
        row.append_text(_computation(segment.action, stop - start, full, colour))
        reached = stop
    return row.append(idle * (window[1] - reached))


def _computation(action: Action, size: int, full: bool, colour: bool) -> Text:
    text = label(action, full)
    if not colour:
        return Text(_plain(text, str(action.kind), size))
    shade = _SHADES[action.kind][(action.microbatch or 0) % 2]
    return Text(text.center(size) if len(text) <= size else " " * size, style=f"bold white on {shade}")


def _plain(text: str, kind: str, size: int) -> str:
    """Return the label of a computation in ASCII, `size` columns wide.

    >>> _plain("F0", "F", 5), _plain("F0", "F", 2), _plain("F12", "F", 2)
    ('F0-- ', 'F0', 'FF')
    """
    if len(text) > size:
        return kind * size
    return text if len(text) == size else text.ljust(size - 1, "-") + " "


def _axis(timeline: Timeline, windows: list[tuple[int, int]], margin: int) -> Text:
    end = format_seconds(timeline.makespan_s)
    columns = sum(stop - start for start, stop in windows) + len(_GAP) * (len(windows) - 1)
    return Text(" " * margin + "0" + end.rjust(max(columns - 1, len(end) + 1)), style="dim")
