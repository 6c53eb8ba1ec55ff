"""A timeline as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

Source: "Trace Event Format" (Duan et al., Google), complete, counter, metadata and flow events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from stagewright.report.pictures.colours import NAMES
from stagewright.report.pictures.scene import KINDS, Scene
from stagewright.schedule import Kind
from stagewright.text import printable

Event = dict[str, Any]

_TRACKS = ("compute", "collectives")
_COMPUTE, _COLLECTIVES = range(len(_TRACKS))
_TRACK_OF = {Kind.GATHER: _COLLECTIVES, Kind.REDUCE: _COLLECTIVES}
_NANO = 1e-9


def chrome_trace(scene: Scene) -> str:
    """Return the trace of `scene`: a process per rank with tracks for its computations, collectives, sends and receives, its
    memory as a counter, and an arrow for every transfer. Times are in microseconds.
    """
    events = [*_actions(scene), *_transfers(scene), *_counters(scene)]
    names = _names(scene, {(event["pid"], event["tid"]) for event in events if "tid" in event})
    document = {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ms",
        "otherData": {"title": printable(scene.title), "size": printable(scene.subtitle)},
    }
    return json.dumps(document, separators=(",", ":"))


def _names(scene: Scene, tracks: set[tuple[int, int]]) -> Iterator[Event]:
    for rank in range(scene.num_ranks):
        stages = ", ".join(str(s) for s, holder in enumerate(scene.rank_of_stage) if holder == rank)
        yield _metadata("process_name", rank, {"name": f"rank {rank} (stages {stages})"})
        yield _metadata("process_sort_index", rank, {"sort_index": rank})
    for rank, track in sorted(tracks):
        yield _metadata("thread_name", rank, {"name": _track_name(scene, track)}, track)
        yield _metadata("thread_sort_index", rank, {"sort_index": track}, track)


def _track_name(scene: Scene, track: int) -> str:
    """Return the name of a track: after the streams of a rank, one per rank it sends to and one per rank it receives from,
    because events of a track must not overlap."""
    if track < len(_TRACKS):
        return _TRACKS[track]
    is_receive, peer = divmod(track - len(_TRACKS), scene.num_ranks)
    return f"receives from rank {peer}" if is_receive else f"sends to rank {peer}"


def _metadata(name: str, rank: int, arguments: Event, track: int = 0) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": arguments}


def _actions(scene: Scene) -> Iterator[Event]:
    bars = scene.bars
    for index in range(len(bars)):
        kind = KINDS[bars.kind[index]]
        arguments: Event = {"stage": int(bars.stage[index])}
        if bars.microbatch[index] >= 0:
            arguments["microbatch"] = int(bars.microbatch[index])
        if bars.num_bytes[index]:
            arguments["bytes"] = float(bars.num_bytes[index])
        yield {
            "ph": "X",
            "name": bars.text(index),
            "cat": NAMES[kind],
            "pid": int(bars.rank[index]),
            "tid": _TRACK_OF.get(kind, _COMPUTE),
            **_span(float(bars.start_s[index]), float(bars.end_s[index])),
            "args": arguments,
        }


def _transfers(scene: Scene) -> Iterator[Event]:
    """Yield each transfer that takes time on the tracks of its sender and of its receiver, with an arrow between them (an
    arrow needs events at both ends)."""
    transfers, placed = scene.transfers, scene.rank_of_stage
    for index in range(len(transfers.microbatch)):
        source, target = int(transfers.source_stage[index]), int(transfers.target_stage[index])
        microbatch = int(transfers.microbatch[index])
        what = "F" if source < target else "B"
        start, end = float(transfers.start_s[index]), float(transfers.end_s[index])
        category, span = "value" if what == "F" else "gradient", _span(start, end)
        if not span["dur"]:
            continue
        first = len(_TRACKS)  # of the tracks of sends, before those of receives
        sender = {"pid": placed[source], "tid": first + placed[target], "cat": category}
        receiver = {"pid": placed[target], "tid": first + scene.num_ranks + placed[source], "cat": category}
        yield {"ph": "X", "name": f"{source}SEND_{what}{microbatch}", **sender, **span}
        yield {"ph": "X", "name": f"{target}RECV_{what}{microbatch}", **receiver, **span}
        # an arrow belongs to the event around its time, so both of its ends lie within the transfer
        middle = span["ts"] + span["dur"] / 2
        yield {"ph": "s", "name": "transfer", "id": index, **sender, "ts": middle}
        yield {"ph": "f", "bp": "e", "name": "transfer", "id": index, **receiver, "ts": middle}


def _counters(scene: Scene) -> Iterator[Event]:
    name, key = ("memory", "bytes") if scene.curves_are_bytes else ("activations", "stage activations")
    for rank, curve in enumerate(scene.curves):
        # of events at one instant only the last is seen
        for index in np.flatnonzero(np.diff(curve.time_s, append=np.inf)):
            yield {
                "ph": "C",
                "name": name,
                "pid": rank,
                "ts": round(float(curve.time_s[index]) / _NANO) / 1000,
                "args": {key: float(curve.held[index])},
            }


def _span(start_s: float, end_s: float) -> dict[str, float]:
    """Return start and duration in whole nanoseconds, so that consecutive events never overlap by a rounding error."""
    start, end = round(start_s / _NANO), round(end_s / _NANO)
    return {"ts": start / 1000, "dur": (end - start) / 1000}
