"""A timeline as one HTML file that needs nothing else: zoom, hover, and what every rank holds beneath."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.report.pictures.colours import FILLS, NAMES, THEMES, ink, shade
from stagewright.report.pictures.panels import Panels
from stagewright.report.pictures.scene import KINDS, Curve, Scene
from stagewright.text import printable

_MARK = re.compile(r"\{\{(title|style|script|data)\}\}")
_MOST_POINTS = 20_000
"""Points of a curve; longer ones keep the highest value of each stretch."""


def html_page(
    scene: Scene, panels: Panels | None = None, name: str = "", others: Mapping[str, Scene] | None = None
) -> str:
    """The document of `scene`, and of the `panels` around it; a megabyte for every 50,000 actions. Where there are `others`,
    by name, buttons choose between them and `scene`, which has a `name` then."""
    here = files("stagewright.report.pictures")
    page, style, *scripts = (
        here.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js", "coarse.js", "panels.js", "shares.js")
    )
    # No tag and no comment begins inside the data, whatever names it has.
    shown = _data(scene) | {
        "report": None if panels is None else panels.document(),
        "name": name,
        "others": {other: _data(one) for other, one in (others or {}).items()},
    }
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    title = scene.title if panels is None else panels.title
    parts = {
        "title": escape(printable(title)), "style": style, "script": "\n".join(scripts), "data": data,
    }  # fmt: skip
    return _MARK.sub(lambda mark: parts[mark[1]], page)  # at once: a name may read as a mark


def _data(scene: Scene) -> dict[str, Any]:
    """Everything the page draws; arrays are little-endian and in base64, seconds in single precision."""
    bars, chunks = scene.bars, np.array(scene.chunks)
    order = np.lexsort((bars.start_s, bars.beside, bars.rank))
    lanes = np.bincount(2 * bars.rank + bars.beside, minlength=2 * scene.num_ranks)
    moves = scene.transfers
    moving = np.flatnonzero(moves.end_s > moves.start_s)
    moving = moving[np.argsort(moves.start_s[moving], kind="stable")]
    return {
        "title": printable(scene.title),
        "subtitle": printable(scene.subtitle),
        "makespan": scene.makespan_s,
        "rankOfStage": scene.rank_of_stage,
        "numChunks": scene.num_chunks,
        "themes": {name: asdict(theme) for name, theme in THEMES.items()},
        "kinds": [
            {
                "text": kind.value, "name": NAMES[kind], "fill": FILLS[kind],
                "fills": [shade(kind, chunk, scene.num_chunks) for chunk in range(scene.num_chunks)],
            }
            for kind in KINDS
        ],
        "inks": [ink(chunk, scene.num_chunks) for chunk in range(scene.num_chunks)],
        "shown": [KINDS.index(kind) for kind in scene.kinds],
        "laneOffsets": [0, *np.cumsum(lanes).tolist()],
        "bars": _packed(
            order, kind=(bars.kind, "<i2"), stage=(bars.stage, "<i2"), chunk=(chunks[bars.stage], "<i2"),
            microbatch=(bars.microbatch, "<i4"), half=(bars.half, "<i2"),
            critical=(bars.is_critical, "<i2"), start=(bars.start_s, "<f4"),
            seconds=(bars.end_s - bars.start_s, "<f4"),
            bytes=(bars.num_bytes if scene.curves_are_bytes else np.zeros(0), "<f4"),
        ),
        "transfers": _packed(
            moving, source=(moves.source_stage, "<i2"), target=(moves.target_stage, "<i2"),
            microbatch=(moves.microbatch, "<i4"), start=(moves.start_s, "<f4"), end=(moves.end_s, "<f4"),
        ),
        "curves": [_curve(curve) for curve in scene.curves],
        "curvesAreBytes": scene.curves_are_bytes,
        "capacities": scene.capacities if scene.curves_are_bytes else (),
    }  # fmt: skip


def _curve(curve: Curve) -> dict[str, Any]:
    time, held = curve.time_s, curve.held
    if len(time) > _MOST_POINTS:
        starts = np.arange(0, len(time), -(-len(time) // _MOST_POINTS))
        time, held = time[starts], np.maximum.reduceat(held, starts)
    return {**_packed(slice(None), time=(time, "<f4"), held=(held, "<f4")), "peak": curve.peak}


def _packed(order: Any, **arrays: tuple[NDArray[Any], str]) -> dict[str, str]:
    """Arrays in an order and an element type, by name; of an empty one nothing."""
    return {
        name: base64.b64encode(values[order].astype(dtype).tobytes()).decode("ascii") if len(values) else ""
        for name, (values, dtype) in arrays.items()
    }
