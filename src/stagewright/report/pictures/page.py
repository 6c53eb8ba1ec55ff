"""A timeline as one self-contained HTML file, with zoom, hover, and the memory of every rank below."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.report.pictures.colours import FILLS, NAMES, THEMES, category_fills, ink, shade
from stagewright.report.pictures.panels import Panels, category_text
from stagewright.report.pictures.scene import KINDS, Curve, Scene
from stagewright.text import printable

_MARK = re.compile(r"\{\{(title|style|script|data)\}\}")
_MOST_POINTS = 20_000
"""Maximum number of points of a curve; longer ones keep the maximum of each interval."""
_ALIGNED = 8
"""Alignment of columns in bytes."""


def html_page(
    scene: Scene,
    panels: Panels | None = None,
    name: str = "",
    alternatives: Mapping[str, Scene] | None = None,
) -> str:
    """Return the page of `scene` and the `panels` around it; a megabyte for about 500,000 actions. With `alternatives`, by
    name, buttons choose between them and `scene`, called `name`."""
    here = files("stagewright.report.pictures")
    page, style, *scripts = (
        here.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js", "coarse.js", "panels.js", "shares.js")
    )
    columns = _Columns()
    shown = _data(scene, columns) | {
        "report": None if panels is None else panels.document(),
        "name": name,
        "others": {other: _data(other_scene, columns) for other, other_scene in (alternatives or {}).items()},
        "categoryFills": category_fills(_categories(scene, panels)),
    }
    shown["columns"] = columns.text()
    # No tag and no comment begins inside the data, whatever names it has.
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    title = scene.title if panels is None else panels.title
    parts = {
        "title": escape(printable(title)), "style": style, "script": "\n".join(scripts), "data": data,
    }  # fmt: skip
    return _MARK.sub(lambda mark: parts[mark[1]], page)  # at once: a name may read as a mark


class _Columns:
    """The numbers of a page, column by column in one compressed block, so that repetition takes little space."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: NDArray[Any], dtype: str) -> dict[str, Any]:
        """Add a column; return its offset, length and type."""
        stored = values.astype(f"<{dtype}").tobytes()
        stored += bytes(-len(stored) % _ALIGNED)
        self._parts.append(stored)
        self._size += len(stored)
        return {"at": self._size - len(stored), "count": len(values), "type": dtype}

    def add_steps(self, values: NDArray[Any], dtype: str, offsets: Sequence[int] = (0,)) -> dict[str, Any]:
        """Add a column as differences; each run, which begins at one of `offsets`, starts with a whole number."""
        steps = np.diff(values, prepend=values.dtype.type(0))
        first = [offset for offset in offsets if offset < len(values)]
        steps[first] = values[first]
        return self.add(steps, dtype) | {"runs": first}

    def text(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts))).decode("ascii")


def _categories(scene: Scene, panels: Panels | None) -> Iterator[str]:
    """Yield the names of memory categories, over time and at the peak."""
    for curve in scene.curves:
        yield from map(category_text, curve.categories)
    if panels is not None:
        yield from panels.categories


def _data(scene: Scene, columns: _Columns) -> dict[str, Any]:
    """Return all data of the page; seconds in single precision."""
    bars, chunks = scene.bars, np.array(scene.chunks)
    order = np.lexsort((bars.start_s, bars.is_overlapped, bars.rank))
    lanes = np.bincount(2 * bars.rank + bars.is_overlapped, minlength=2 * scene.num_ranks)
    offsets = [0, *np.cumsum(lanes).tolist()]
    transfers = scene.transfers
    moving = np.flatnonzero(transfers.end_s > transfers.start_s)
    edges = np.stack([transfers.source_stage, transfers.target_stage])[:, moving]
    firsts = np.flatnonzero(np.diff(edges, axis=1, prepend=-1).any(axis=0)).tolist()
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
        "laneOffsets": offsets,
        "bars": {
            "kind": columns.add(bars.kind[order], "i2"),
            "stage": columns.add(bars.stage[order], "i2"),
            "chunk": columns.add(chunks[bars.stage[order]], "i2"),
            "microbatch": columns.add_steps(bars.microbatch[order], "i4"),
            "half": columns.add(bars.half[order], "i2"),
            "critical": columns.add(bars.is_critical[order], "i2"),
            "start": columns.add_steps(bars.start_s[order], "f4", offsets),
            "seconds": columns.add((bars.end_s - bars.start_s)[order], "f4"),
            "bytes": columns.add(bars.num_bytes[order] * scene.curves_are_bytes, "f4"),
        },
        "transfers": {
            "source": columns.add(edges[0], "i2"),
            "target": columns.add(edges[1], "i2"),
            "microbatch": columns.add_steps(transfers.microbatch[moving], "i4"),
            "start": columns.add_steps(transfers.start_s[moving], "f4", firsts),
            "seconds": columns.add((transfers.end_s - transfers.start_s)[moving], "f4"),
        },
        "curves": [_curve(curve, columns) for curve in scene.curves],
        "curvesAreBytes": scene.curves_are_bytes,
        "capacities": scene.capacities if scene.curves_are_bytes else (),
    }  # fmt: skip


def _curve(curve: Curve, columns: _Columns) -> dict[str, Any]:
    """Return the memory of a rank, by category if known: a number, or a column if it changes."""
    every = -(-len(curve.time_s) // _MOST_POINTS)
    starts = np.arange(0, len(curve.time_s), every)
    highest = starts + [int(np.argmax(curve.held[start : start + every])) for start in starts]
    parts = {
        category_text(name): float(values[0])
        if (values == values[0]).all()
        else columns.add_steps(values[highest], "f8")
        for name, values in curve.categories.items()
    }
    held = None if parts else columns.add_steps(curve.held[highest], "f8")
    return {
        "time": columns.add_steps(curve.time_s[starts], "f4"),
        "held": held,
        "parts": parts,
        "peak": curve.peak,
    }
