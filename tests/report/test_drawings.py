"""Pictures and traces show the timeline they are made from: nothing lost, nothing moved."""

from __future__ import annotations

import base64
import itertools
import json
import re
import time
import xml.etree.ElementTree as ET
import zlib
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stagewright.estimation.flat_bytes import GATHERED, SHARDS, SUMMED, WHOLE
from stagewright.report.pictures import chrome_trace, html_page, png_image, scene_of, svg_image
from stagewright.report.pictures.colours import THEMES, category_fills
from stagewright.report.pictures.panels import category_text
from stagewright.report.pictures.scene import KINDS, Curve
from stagewright.schedule import build, insert_communication, insert_gathers, insert_reductions
from stagewright.simulation import StageCosts, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def looped() -> Timeline:
    """Breadth-first with gathers, reductions and memory."""
    program = insert_reductions(insert_gathers(build("breadth-first", 2, 4, 2)))
    costs = StageCosts.uniform(4, gather_s=0.5, reduce_s=0.7, saved_bytes=3.0, gathered_bytes=5.0)
    return simulate(insert_communication(program), costs, 0.25)


def paired() -> Timeline:
    return simulate(build("dualpipe-v", 2, 6, overlap=True), StageCosts.uniform(4), 0.25)


@pytest.mark.parametrize("timeline", [looped(), paired()], ids=["looped", "paired"])
def test_a_scene_has_every_action_with_its_times(timeline: Timeline) -> None:
    bars = scene_of(timeline).bars
    shown = [(bars.rank[i], bars.text(i), bars.start_s[i], bars.end_s[i]) for i in range(len(bars))]
    expected = [
        (event.rank, str(part), event.start_s, event.end_s)
        for rank in range(timeline.num_ranks)
        for event in timeline.events(rank)
        if event.end_s > event.start_s
        for part in event.action.parts
    ]
    assert shown == expected


def test_without_bytes_the_curves_count_activations() -> None:
    scene = scene_of(simulate(build("1f1b", 4, 8), StageCosts.uniform(4)))
    assert not scene.curves_are_bytes
    assert [curve.peak for curve in scene.curves] == [4, 3, 2, 1]


def test_with_bytes_the_curves_are_the_timelines() -> None:
    timeline = looped()
    scene = scene_of(timeline)
    assert scene.curves_are_bytes
    assert [curve.peak for curve in scene.curves] == timeline.peak_bytes.tolist()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_svg_draws_and_labels_every_computation(theme: str) -> None:
    timeline = simulate(build("1f1b", 4, 8), StageCosts.uniform(4), 0.25)
    root = ET.fromstring(svg_image(scene_of(timeline), theme=theme))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [texts.count(f"F{m}") for m in range(8)] == [4] * 8
    assert [texts.count(f"B{m}") for m in range(8)] == [4] * 8
    assert f"1f1b: 37 s, bubble {timeline.bubble_fraction:.1%}" in texts
    filled = [path for group in root.iter(f"{SVG}g") if group.get("fill") for path in group]
    assert len(filled) == 64


def test_an_svg_of_many_actions_stays_small() -> None:
    timeline = simulate(build("gpipe", 2, 20_000), StageCosts.uniform(2))
    assert len(svg_image(scene_of(timeline))) < 100_000


def test_a_png_is_an_image_of_twice_the_svgs_size() -> None:
    pytest.importorskip("resvg_py")
    image = png_image(svg_image(scene_of(looped()), width=600))
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20]) == 2 * 600


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def column(data: dict[str, Any], *names: str | int) -> np.ndarray:
    """A column of the page as its script reads it."""
    found: Any = data
    for name in names:
        found = found[name]
    block = zlib.decompress(base64.b64decode(data["columns"]))
    stored = np.frombuffer(block, f"<{found['type']}", found["count"], found["at"])
    if "runs" not in found:
        return stored
    ends = [*found["runs"][1:], len(stored)]
    runs = [
        stored[at:end].astype(stored.dtype.kind + "8").cumsum()
        for at, end in zip(found["runs"], ends, strict=True)
    ]
    return np.concatenate([stored[:0], *runs])


def test_a_page_holds_every_bar_and_needs_no_network() -> None:
    timeline = looped()
    page = html_page(scene_of(timeline))
    data = page_data(page)
    bars = scene_of(timeline).bars
    order = np.lexsort((bars.start_s, bars.is_overlapped, bars.rank))
    assert data["laneOffsets"][-1] == len(bars)
    assert {KINDS[index].value for index in column(data, "bars", "kind")} == {"F", "B", "GATHER", "REDUCE"}
    np.testing.assert_allclose(column(data, "bars", "start"), bars.start_s[order], rtol=1e-6)
    np.testing.assert_array_equal(column(data, "bars", "microbatch"), bars.microbatch[order])
    assert not re.search(r"(src|href)=|https?://|import\(|fetch\(", page)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_a_page_of_many_actions_is_small_and_soon_made(name: str, chunks: int) -> None:
    costs = StageCosts.uniform(64 * chunks, 1.0, 1.1, 0.9, saved_bytes=3.0)
    scene = scene_of(simulate(build(name, 64, 512, chunks), costs, 0.1))
    begin = time.process_time()
    page = html_page(scene)
    assert time.process_time() - begin < 3 and len(page) < 2**20


def test_a_page_with_times_as_a_run_has_them_is_small() -> None:
    """None of which repeats itself."""
    scene = scene_of(simulate(build("interleaved-1f1b", 64, 512, 2), StageCosts.uniform(128), 0.1))
    jitter = 1 + 1e-3 * np.random.default_rng(0).random(len(scene.bars))
    bars = replace(scene.bars, end_s=scene.bars.start_s + (scene.bars.end_s - scene.bars.start_s) * jitter)
    bars = replace(bars, start_s=bars.start_s * (1 + 1e-3 * np.random.default_rng(1).random(len(bars))))
    assert len(html_page(replace(scene, bars=bars))) < 8e6


def test_a_page_tells_every_categorys_bytes_to_the_byte() -> None:
    held = np.cumsum(np.random.default_rng(0).integers(0, 2**36, 50_000)).astype(float)
    parts = {"parameters": np.full(50_000, 2.0**33 + 1), "whole_gradients": held}
    curve = Curve(np.arange(50_000.0), 2.0**33 + 1 + held, float(held[-1]), parts)
    scene = scene_of(simulate(build("gpipe", 1, 1), StageCosts.uniform(1, saved_bytes=1)), [curve])
    data = page_data(html_page(scene))
    shown = data["curves"][0]["parts"]
    assert shown["parameters"] == 2**33 + 1
    found = column(data, "curves", 0, "parts", "whole gradients")
    assert len(found) < 20_000 and {*found} < {*held} and found[-1] == held[-1]
    assert len(column(data, "curves", 0, "time")) == len(found)
    assert list(data["categoryFills"]) == ["parameters", "whole gradients"]


def test_no_two_categories_have_one_colour() -> None:
    resident = ("parameters", "gradients", "optimizer", "master", "constants", "workspace", "weight versions")
    known = (
        *resident,
        GATHERED,
        WHOLE,
        SUMMED,
        SHARDS,
        "inputs",
        "activations",
        "recomputed",
        "transient",
        "boundary",
    )
    names = [category_text(name) for name in known]
    fills = category_fills(names)
    assert list(fills) == names and len({*fills.values()}) == len(names)
    assert "#9aa3b0" not in fills.values() and category_fills([*names, "other"])["other"] == "#9aa3b0"
    for theme in THEMES.values():
        assert min(abs(luminance(fill) - luminance(theme.ground)) for fill in fills.values()) > 0.03


def luminance(colour: str) -> float:
    """From 0 to 1 (WCAG)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return sum(
        share * channel**2.2 for share, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True)
    )


def test_a_page_sorts_the_computations_of_each_rank_by_time() -> None:
    data = page_data(html_page(scene_of(paired())))
    start = column(data, "bars", "start")
    for begin, end in zip(data["laneOffsets"][:-1], data["laneOffsets"][1:], strict=True):
        assert (np.diff(start[begin:end]) >= 0).all()


def test_a_program_name_cannot_leave_its_place_in_a_page() -> None:
    program = replace(build("gpipe", 1, 1), name="</script><b>")
    timeline = simulate(program, StageCosts.uniform(1))
    page = html_page(scene_of(timeline))
    assert "</script><b>" not in page
    assert page_data(page)["title"].startswith("</script><b>")
    ET.fromstring(svg_image(scene_of(timeline)))


@pytest.mark.parametrize("timeline", [looped(), paired()], ids=["looped", "paired"])
def test_events_of_a_trace_nest_on_every_track(timeline: Timeline) -> None:
    events = json.loads(chrome_trace(scene_of(timeline)))["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for before, after in itertools.pairwise(spans):
            assert after[0] >= before[1] - 1e-6 or after[1] <= before[1] + 1e-6
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(tracks)


def test_every_arrow_of_a_trace_starts_and_ends_in_a_transfer() -> None:
    events = json.loads(chrome_trace(scene_of(looped())))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in ("s", "f"))
    assert begins.keys() == ends.keys() and len(begins) == 2 * 3 * 4
    for arrow in [*begins.values(), *ends.values()]:
        around = [
            span["name"]
            for span in spans
            if (span["pid"], span["tid"]) == (arrow["pid"], arrow["tid"])
            and span["ts"] <= arrow["ts"] <= span["ts"] + span["dur"]
        ]
        assert len(around) == 1 and re.match(r"\d+(SEND|RECV)_[FB]\d+$", around[0])


def test_a_trace_counts_memory_and_names_the_ranks() -> None:
    timeline = looped()
    events = json.loads(chrome_trace(scene_of(timeline)))["traceEvents"]
    for rank in range(2):
        held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(held) == timeline.peak_bytes[rank]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 (stages 0, 2)", "rank 1 (stages 1, 3)"]
