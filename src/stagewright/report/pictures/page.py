"""A timeline as one HTML file that needs nothing else: zoom, hover, and what every rank holds beneath."""

from __future__ import annotations

import base64
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.report.pictures.colours import FILLS, NAMES, THEMES, ink, shade
from stagewright.report.pictures.scene import KINDS, Curve, Scene
from stagewright.text import printable

_MARK = re.compile(r"\{\{(title|style|script|data)\}\}")
_MOST_POINTS = 20_000
"""Points of a curve; longer ones keep the highest value of each stretch."""


def html_page(scene: Scene) -> str:
    """The document of `scene`; a megabyte for every 50,000 actions."""
    here = files("stagewright.report.pictures")
    page, style, *scripts = (
        here.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js", "coarse.js")
    )
    # No tag and no comment begins inside the data, whatever names it has.
    data = json.dumps(_data(scene), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(printable(scene.title)), "style": style, "script": "\n".join(scripts), "data": data,
    }  # fmt: skip
    return _MARK.sub(lambda mark: parts[mark[1]], page)  # at once: a name may read as a mark


def _data(scene: Scene) -> dict[str, Any]:
    """Everything the page draws; arrays are little-endian and in base64, seconds in single precision."""
    bars, chunks = scene.bars, np.array(scene.chunks)
    order = np.lexsort((bars.start_s, bars.beside, bars.rank))
    lanes = np.bincount(2 * bars.rank + bars.beside, minlength=2 * scene.num_ranks)
    return {
        "title": printable(scene.title),
        "subtitle": printable(scene.subtitle),
        "makespan": scene.makespan_s,
        "rankOfStage": scene.rank_of_stage,
        "numChunks": scene.num_chunks,
        "themes": {name: _public(theme) for name, theme in THEMES.items()},
        "kinds": [_kind(index, scene.num_chunks) for index in range(len(KINDS))],
        "inks": [ink(chunk, scene.num_chunks) for chunk in range(scene.num_chunks)],
        "shown": [KINDS.index(kind) for kind in scene.kinds],
        "laneOffsets": [0, *np.cumsum(lanes).tolist()],
        "bars": {
            "kind": _packed(bars.kind[order], "<i2"),
            "stage": _packed(bars.stage[order], "<i2"),
            "chunk": _packed(chunks[bars.stage[order]], "<i2"),
            "microbatch": _packed(bars.microbatch[order], "<i4"),
            "half": _packed(bars.half[order], "<i2"),
            "start": _packed(bars.start_s[order], "<f4"),
            "seconds": _packed((bars.end_s - bars.start_s)[order], "<f4"),
            "bytes": _packed(bars.num_bytes[order], "<f4") if scene.curves_are_bytes else "",
        },
        "transfers": _transfers(scene),
        "curves": [_curve(curve) for curve in scene.curves],
        "curvesAreBytes": scene.curves_are_bytes,
    }


def _transfers(scene: Scene) -> dict[str, str]:
    moves = scene.transfers
    chosen = np.flatnonzero(moves.end_s > moves.start_s)
    chosen = chosen[np.argsort(moves.start_s[chosen], kind="stable")]
    return {
        "source": _packed(moves.source_stage[chosen], "<i2"),
        "target": _packed(moves.target_stage[chosen], "<i2"),
        "microbatch": _packed(moves.microbatch[chosen], "<i4"),
        "start": _packed(moves.start_s[chosen], "<f4"),
        "end": _packed(moves.end_s[chosen], "<f4"),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    time, held = curve.time_s, curve.held
    if len(time) > _MOST_POINTS:
        starts = np.arange(0, len(time), -(-len(time) // _MOST_POINTS))
        time, held = time[starts], np.maximum.reduceat(held, starts)
    return {"time": _packed(time, "<f4"), "held": _packed(held, "<f4"), "peak": curve.peak}


def _kind(index: int, num_chunks: int) -> dict[str, Any]:
    kind = KINDS[index]
    fills = [shade(kind, chunk, num_chunks) for chunk in range(num_chunks)]
    return {"text": kind.value, "name": NAMES[kind], "fill": FILLS[kind], "fills": fills}


def _public(theme: Any) -> dict[str, str]:
    return {name: getattr(theme, name) for name in type(theme).__dataclass_fields__}


def _packed(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
