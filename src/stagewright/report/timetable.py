"""A timeline as one row of text per rank: coloured on a terminal, in ASCII elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from stagewright.schedule.action import COMPUTE, Action
from stagewright.simulation import Timeline
from stagewright.units import format_seconds

_SHADES = {"F": ("blue", "dark_blue"), "B": ("green", "dark_green"), "I": ("cyan", "dark_cyan"),
           "W": ("magenta", "dark_magenta"), "R": ("yellow", "dark_goldenrod")}  # fmt: skip
_IDLE = "."


@dataclass(frozen=True, slots=True)
class Segment:
    """One computation in the picture: columns `start` to `stop` of its rank's row."""

    action: Action
    start: int
    stop: int


def picture(timeline: Timeline, width: int, colour: bool) -> list[Text]:
    """The rows of all ranks and a time axis, at most `width` columns wide.

    As wide as the label of the shortest computation asks for; where that is too wide, labels are left out
    and computations shorter than a column merge with their neighbours.
    """
    margin = len(f"rank {timeline.num_ranks - 1} ")
    columns = _columns(timeline, max(width - margin - 1, 10))
    rows = []
    for rank in range(timeline.num_ranks):
        row = Text(f"rank {rank} ".rjust(margin), no_wrap=True)
        row.append_text(_row(list(segments(timeline, rank, columns)), columns, _full(timeline), colour))
        rows.append(row)
    return [*rows, _axis(timeline, columns, margin)]


def segments(timeline: Timeline, rank: int, columns: int) -> Iterator[Segment]:
    """The computations of `rank` on a grid of `columns`; those that cover no column are left out."""
    scale = columns / timeline.makespan_s if timeline.makespan_s else 0.0
    for event in timeline.events(rank):
        if event.action.kind not in COMPUTE:
            continue
        start, stop = round(event.start_s * scale), round(event.end_s * scale)
        if stop > start:
            yield Segment(event.action, start, stop)


def label(action: Action, full: bool) -> str:
    """What a computation is called: with its stage where a rank has several.

    >>> label(Action.parse("2F0"), full=False), label(Action.parse("2F0"), full=True)
    ('F0', '2F0')
    """
    return str(action) if full else f"{action.kind}{action.microbatch}"


def _full(timeline: Timeline) -> bool:
    placement = timeline.encoded.placement
    return placement.num_stages > placement.num_ranks


def _columns(timeline: Timeline, room: int) -> int:
    """Columns of the picture: a whole number for the shortest computation where there is room for one."""
    shortest = _shortest_seconds(timeline)
    if not shortest:
        return room
    units = timeline.makespan_s / shortest
    wanted = len(max(_labels(timeline), key=len)) + 1
    return min(room, math.ceil(units * max(1, min(wanted, int(room / units + 1e-9))) - 1e-9))


def _shortest_seconds(timeline: Timeline) -> float:
    seconds = (timeline.end_s - timeline.start_s)[timeline.is_compute]
    return float(seconds[seconds > 0].min(initial=math.inf)) if (seconds > 0).any() else 0.0


def _labels(timeline: Timeline) -> Iterator[str]:
    full = _full(timeline)
    for rank in range(timeline.num_ranks):
        yield from (label(event.action, full) for event in timeline.events(rank))


def _row(found: list[Segment], columns: int, full: bool, colour: bool) -> Text:
    row, reached = Text(), 0
    for segment in found:
        row.append((" " if colour else _IDLE) * (segment.start - reached))
        size = segment.stop - segment.start
        text = label(segment.action, full)
        if colour:
            shade = _SHADES[segment.action.kind][(segment.action.microbatch or 0) % 2]
            row.append(text.center(size) if len(text) <= size else " " * size, style=f"bold white on {shade}")
        else:
            row.append(_plain(text, str(segment.action.kind), size))
        reached = segment.stop
    return row.append((" " if colour else _IDLE) * (columns - reached))


def _plain(text: str, kind: str, size: int) -> str:
    """
    >>> _plain("F0", "F", 5), _plain("F0", "F", 2), _plain("F12", "F", 2)
    ('F0-- ', 'F0', 'FF')
    """
    if len(text) > size:
        return kind * size
    return text if len(text) == size else text.ljust(size - 1, "-") + " "


def _axis(timeline: Timeline, columns: int, margin: int) -> Text:
    end = format_seconds(timeline.makespan_s)
    return Text(" " * margin + "0" + end.rjust(max(columns - 1, len(end) + 1)), style="dim")
