"""Traces keep to Chrome's trace event format, in the parts that ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stagewright.report.pictures import chrome_trace, scene_of
from stagewright.schedule import (
    build,
    insert_communication,
    insert_gathers,
    insert_recomputation,
    insert_reductions,
)
from stagewright.simulation import StageCosts, Timeline, simulate

Document = dict[str, Any]
Event = dict[str, Any]

REQUIRED = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "bp", "name", "cat", "id", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index"} | {
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def sharded() -> Timeline:
    program = insert_reductions(insert_gathers(build("breadth-first", 3, 4, 2)))
    costs = StageCosts.uniform(6, gather_s=0.5, reduce_s=0.7, saved_bytes=3.0, gathered_bytes=5.0)
    return simulate(insert_communication(program), costs, 0.25)


def saving() -> Timeline:
    program = insert_recomputation(build("1f1b", 4, 6), [1, 2])
    costs = StageCosts.uniform(4, 1e-3, 1.3e-3, 0.7e-3, saved_bytes=2.0)
    return simulate(insert_communication(program), costs, 1e-4)


TIMELINES: dict[str, Callable[[], Timeline]] = {
    "sharded": sharded,
    "saving": saving,
    "paired": lambda: simulate(build("dualpipe-v", 2, 6, overlap=True), StageCosts.uniform(4), 0.25),
    "odd times": lambda: simulate(
        build("zb-v", 3, 5), StageCosts.of([1 / 3] * 6, [1 / 7] * 6, [1e-7] * 6), 1 / 9
    ),
    "transfers take no time": lambda: simulate(build("hanayo", 2, 4), StageCosts.uniform(4)),
    "one rank": lambda: simulate(build("gpipe", 1, 3), StageCosts.uniform(1)),
    "asynchronous": lambda: simulate(build("pipedream", 3, 7), StageCosts.uniform(3), 0.1),
}


def document_of(timeline: Timeline) -> Document:
    return json.loads(chrome_trace(scene_of(timeline)))


def faults(document: Document) -> Iterator[str]:
    """What is wrong with a trace, in words."""
    if not isinstance(document.get("traceEvents"), list) or document.get("displayTimeUnit") not in (
        "ms",
        "ns",
    ):
        yield "not an object with events and a unit"
        return
    events: list[Event] = document["traceEvents"]
    for event in events:
        yield from _event_faults(event)
    slices = _slices(events)
    for spans in slices.values():
        yield from _nesting_faults(sorted(spans, key=lambda span: (span[0], -span[1])))
    yield from _flow_faults(events, slices)
    yield from _name_faults(events, set(slices))


def _event_faults(event: Event) -> Iterator[str]:
    missing = REQUIRED.get(event.get("ph", ""), {"a known phase"}) - event.keys()
    if missing:
        yield f"missing {missing}"
        return
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
        ):
            yield f"{key} is {value}"
    for key in ("pid", "tid"):
        if not isinstance(event.get(key, 0), int):
            yield f"{key} is {event[key]}"
    if event["ph"] == "f" and event["bp"] != "e":
        yield "an arrow's end binds to the next event instead of the one around it"
    if event["ph"] == "C" and not all(isinstance(held, int | float) for held in event["args"].values()):
        yield "a counter without a number"
    if event["ph"] == "M" and METADATA.get(event["name"]) not in event["args"]:
        yield f"metadata {event['name']} without its value"


def _slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return found


def _nesting_faults(spans: list[tuple[float, float]]) -> Iterator[str]:
    """Events of a track follow each other or lie within each other; two never overlap in part."""
    around: list[tuple[float, float]] = []
    for begin, end in spans:
        while around and around[-1][1] <= begin + 1e-6:
            around.pop()
        if around and end > around[-1][1] + 1e-6:
            yield f"{begin}-{end} overlaps {around[-1]} in part"
        around.append((begin, end))


def _flow_faults(
    events: list[Event], slices: dict[tuple[int, int], list[tuple[float, float]]]
) -> Iterator[str]:
    begins, ends = (
        {(e["cat"], e["name"], e["id"]): e for e in events if e["ph"] == phase} for phase in ("s", "f")
    )
    if begins.keys() != ends.keys():
        yield "an arrow with one end"
    counts = Counter(event["ph"] for event in events)
    if not counts["s"] == counts["f"] == len(begins):
        yield "two arrows with one id"
    for key in begins.keys() & ends.keys():
        if begins[key]["ts"] > ends[key]["ts"]:
            yield "an arrow that goes back in time"
        for end in (begins[key], ends[key]):
            spans = slices.get((end["pid"], end["tid"]), [])
            if not any(first <= end["ts"] <= last and first < last for first, last in spans):
                yield f"an arrow that ends outside every event: {end}"


def _name_faults(events: list[Event], tracks: set[tuple[int, int]]) -> Iterator[str]:
    processes = Counter(e["pid"] for e in events if e["name"] == "process_name")
    threads = Counter((e["pid"], e["tid"]) for e in events if e["name"] == "thread_name")
    if set(processes) != {event["pid"] for event in events} or set(processes.values()) != {1}:
        yield "a process without a name, or with two"
    if set(threads) != tracks or set(threads.values()) - {1}:
        yield "a track without a name, or a name without a track"


@pytest.mark.parametrize("name", TIMELINES)
def test_a_trace_keeps_to_the_format(name: str) -> None:
    assert list(faults(document_of(TIMELINES[name]()))) == []


@pytest.mark.parametrize("name", TIMELINES)
def test_times_are_microseconds_of_the_simulation(name: str) -> None:
    timeline = TIMELINES[name]()
    events = document_of(timeline)["traceEvents"]
    shown = [e for e in events if e["ph"] == "X" and "SEND" not in e["name"] and "RECV" not in e["name"]]
    bars = scene_of(timeline).bars
    assert len(shown) == len(bars) > 0
    for event, begin, end in zip(shown, bars.start_s, bars.end_s, strict=True):
        assert event["ts"] == pytest.approx(begin * 1e6, abs=1e-3)
        assert event["ts"] + event["dur"] == pytest.approx(end * 1e6, abs=1e-3)


FAULTS: dict[str, tuple[Callable[[Document], Any], str]] = {
    "a list": (lambda d: d.pop("traceEvents"), "not an object"),
    "no duration": (lambda d: _first(d, "X").pop("dur"), "missing"),
    "unknown phase": (lambda d: _first(d, "X").update(ph="Z"), "missing"),
    "before the start": (lambda d: _first(d, "X").update(ts=-1.0), "ts is"),
    "not a number": (lambda d: _first(d, "C").update(ts=math.nan), "ts is"),
    "too long": (lambda d: _first(d, "X").update(dur=_first(d, "X")["dur"] * 1.5), "overlaps"),
    "arrow into nothing": (lambda d: _first(d, "f").update(ts=1e12), "outside every event"),
    "arrow without end": (lambda d: _first(d, "f").update(id=-1), "one end"),
    "arrow to the next event": (lambda d: _first(d, "f").update(bp="n"), "binds"),
    "nameless process": (lambda d: _first(d, "M").update(name="process_labels"), "metadata"),
    "nameless track": (lambda d: d["traceEvents"].remove(_first(d, "M", "thread_name")), "without a name"),
}


def _first(document: Document, phase: str, name: str = "") -> Event:
    return next(e for e in document["traceEvents"] if e["ph"] == phase and e["name"].startswith(name))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_the_format_is_found(fault: str) -> None:
    document = copy.deepcopy(document_of(sharded()))
    spoil, message = FAULTS[fault]
    spoil(document)
    assert any(message in found for found in faults(document))
