"""A timeline as a static picture, SVG or PNG, with the memory of every rank below."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from stagewright.errors import InputError
from stagewright.report.pictures.colours import FILLS, NAMES, THEMES, Theme, ink, shade
from stagewright.report.pictures.scene import KINDS, Curve, Scene
from stagewright.text import printable
from stagewright.units import format_bytes, format_seconds

_MARGIN = 20.0
_HEAD = 92.0
_AXIS = 34.0
_CURVES = 130.0
_MOST_TRANSFERS = 600
"""Maximum number of lines; more would hide the bars."""
_MOST_SHADES = 8
"""Maximum number of shades in the legend; more would not fit."""
_FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class _TimelineLayout:
    """Layout in pixels; a rank's row has a thin lane for actions that overlap with its computations."""

    scene: Scene
    theme: Theme
    width: float
    row: float
    gap: float
    lane: float
    left_x: float

    @property
    def scale(self) -> float:
        """Pixels per second."""
        return (self.width - self.left_x - _MARGIN) / (self.scene.makespan_s or 1.0)

    @property
    def pitch(self) -> float:
        return self.row + self.lane + self.gap

    @property
    def bottom(self) -> float:
        return _HEAD + self.pitch * self.scene.num_ranks - self.gap

    @property
    def height(self) -> float:
        return self.bottom + _AXIS + _CURVES + 2 * _MARGIN + 10

    def x(self, seconds: float) -> float:
        return self.left_x + seconds * self.scale

    def y(self, rank: int) -> float:
        return _HEAD + rank * self.pitch


def svg_image(scene: Scene, *, width: int = 1400, theme: str = "light") -> str:
    """Return the SVG document of `scene`, `width` pixels wide, in the ``light`` or ``dark`` theme.

    Neighbouring bars of less than a pixel are drawn as one, so the document stays small for any program.
    """
    row = float(np.clip(640 / scene.num_ranks - 4, 7, 34))
    lane = max(3.0, row / 5) if scene.bars.is_overlapped.any() else 0.0
    left_x = _MARGIN + 16 + 7.2 * len(f"rank {scene.num_ranks - 1}")
    layout = _TimelineLayout(scene, THEMES[theme], float(width), row, 5.0 if row > 12 else 2.0, lane, left_x)
    parts = [*_head(layout), *_rows(layout), *_bars(layout), *_transfers(layout), *_axis(layout)]
    parts += _curves(layout)
    size = f'width="{width}" height="{layout.height:.0f}" viewBox="0 0 {width} {layout.height:.0f}"'
    ground = f'<rect width="100%" height="100%" fill="{layout.theme.ground}"/>'
    body = "\n".join([ground, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}">\n{body}\n</svg>\n'


def _head(layout: _TimelineLayout) -> Iterator[str]:
    scene, theme = layout.scene, layout.theme
    yield _text(_MARGIN, 34, scene.title, theme.text, size=19, weight=600)
    yield _text(_MARGIN, 56, scene.subtitle, theme.faint, size=13)
    x = _MARGIN
    for kind in scene.kinds:
        yield f'<rect x="{x:.1f}" y="68" width="12" height="12" rx="2" fill="{FILLS[kind]}"/>'
        yield _text(x + 18, 78.5, NAMES[kind], theme.text, size=12)
        x += 18 + 7.0 * len(NAMES[kind]) + 18
    if scene.num_chunks > 1:
        chunks = np.unique(np.linspace(0, scene.num_chunks - 1, _MOST_SHADES).round().astype(int))
        shades = [shade(scene.kinds[0], int(chunk), scene.num_chunks) for chunk in chunks]
        for chunk, fill in enumerate(shades):
            yield f'<rect x="{x + 12 * chunk:.1f}" y="68" width="12" height="12" fill="{fill}"/>'
        text = "first to last stage of a rank"
        yield _text(x + 12 * len(shades) + 6, 78.5, text, theme.text, size=12)
        x += 12 * len(shades) + 6 + 7.0 * len(text) + 18
    if len(_visible_transfers(scene)):
        for text, colour in (("value on its way", theme.value), ("gradient on its way", theme.gradient)):
            yield _rect(x, 73, 16, 2, colour)
            yield _text(x + 22, 78.5, text, theme.text, size=12)
            x += 22 + 7.0 * len(text) + 18


def _rows(layout: _TimelineLayout) -> Iterator[str]:
    scene = layout.scene
    every = max(1, int(np.ceil(11 / layout.pitch)))
    for rank in range(scene.num_ranks):
        y = layout.y(rank)
        width = layout.width - layout.left_x - _MARGIN
        yield _rect(layout.left_x, y, width, layout.row, layout.theme.idle)
        if rank % every == 0:
            baseline = y + layout.row / 2 + 4
            yield _text(layout.left_x - 10, baseline, f"rank {rank}", layout.theme.faint, 12, anchor="end")


def _bars(layout: _TimelineLayout) -> Iterator[str]:
    """Yield rectangles grouped by colour; touching bars of less than a pixel are merged."""
    scene, bars = layout.scene, layout.scene.bars
    chunk = np.array(scene.chunks)[bars.stage]
    starts, ends = layout.left_x + bars.start_s * layout.scale, layout.left_x + bars.end_s * layout.scale
    for kind in np.unique(bars.kind):
        for chunk_number in np.unique(chunk[bars.kind == kind]):
            chosen = np.flatnonzero((bars.kind == kind) & (chunk == chunk_number))
            yield f'<g fill="{shade(KINDS[kind], int(chunk_number), scene.num_chunks)}">'
            for first, last in _merged(chosen, starts, ends, bars.rank):
                yield _bar(layout, first, float(starts[first]), float(ends[last]))
            yield "</g>"
    yield from _labels(layout, chunk, starts, ends)


def _bar(layout: _TimelineLayout, index: int, start: float, end: float) -> str:
    bars = layout.scene.bars
    y, height = layout.y(int(bars.rank[index])), layout.row
    if bars.is_overlapped[index]:
        y, height = y + layout.row + 1, layout.lane - 1
    elif bars.half[index]:
        y, height = y + (bars.half[index] - 1) * height / 2, height / 2
    width = max(end - start - (0.6 if end - start > 3 else 0.0), 0.3)
    return f'<path d="M{start:.2f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z"/>'


def _merged(
    chosen: np.ndarray, start: np.ndarray, end: np.ndarray, rank: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield first and last of every run of bars under a pixel wide that are within a pixel of each other."""
    if not len(chosen):
        return
    narrow = end[chosen] - start[chosen] < 1
    near = np.diff(start[chosen], prepend=-np.inf) < 1
    same = np.diff(rank[chosen], prepend=-1) == 0
    firsts = np.flatnonzero(~(narrow & near & same & np.roll(narrow, 1)))
    for first, stop in zip(firsts, [*firsts[1:], len(chosen)], strict=True):
        yield int(chosen[first]), int(chosen[stop - 1])


def _labels(layout: _TimelineLayout, chunk: np.ndarray, start: np.ndarray, end: np.ndarray) -> Iterator[str]:
    """Yield the longest of ``2F0``, ``F0`` and ``0`` that fits in each bar, if any does."""
    scene, bars = layout.scene, layout.scene.bars
    if layout.row < 11:
        return
    size = min(12.0, layout.row * 0.45)
    yield f'<g font-size="{size:.1f}" text-anchor="middle">'
    for index in np.flatnonzero((end - start > size * 0.75) & ~bars.is_overlapped & (bars.microbatch >= 0)):
        full = bars.text(int(index))
        wanted = (full if scene.num_chunks > 1 else full.lstrip("0123456789"), str(bars.microbatch[index]))
        num_characters = (end[index] - start[index] - 2) / (size * 0.6)
        text = next((label for label in wanted if len(label) <= num_characters), None)
        if text is not None:
            part = (0.5, 0.25, 0.75)[bars.half[index]]
            middle = layout.y(int(bars.rank[index])) + part * layout.row
            x, y = (start[index] + end[index]) / 2, middle + size * 0.36
            colour = ink(int(chunk[index]), scene.num_chunks)
            yield f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{text}</text>'
    yield "</g>"


def _transfers(layout: _TimelineLayout) -> Iterator[str]:
    transfers, placed = layout.scene.transfers, np.array(layout.scene.rank_of_stage)
    visible = _visible_transfers(layout.scene)
    for is_value, colour in ((True, layout.theme.value), (False, layout.theme.gradient)):
        lines = []
        for index in visible[(transfers.source_stage < transfers.target_stage)[visible] == is_value]:
            source, target = placed[transfers.source_stage[index]], placed[transfers.target_stage[index]]
            y, to = (layout.y(int(rank)) + layout.row / 2 for rank in (source, target))
            x, until = layout.x(float(transfers.start_s[index])), layout.x(float(transfers.end_s[index]))
            edge = layout.row / 2 * np.sign(to - y)
            lines.append(f"M{x:.1f} {y + edge:.1f}L{until:.1f} {to - edge:.1f}")
        if lines:
            yield f'<path d="{"".join(lines)}" stroke="{colour}" stroke-opacity="0.8" fill="none"/>'


def _visible_transfers(scene: Scene) -> np.ndarray:
    """Return transfers between neighbouring ranks that take time; none if there are too many."""
    transfers, placed = scene.transfers, np.array(scene.rank_of_stage)
    is_near = np.abs(placed[transfers.source_stage] - placed[transfers.target_stage]) == 1
    visible = np.flatnonzero((transfers.end_s > transfers.start_s) & is_near)
    return visible if len(visible) <= _MOST_TRANSFERS else visible[:0]


def _axis(layout: _TimelineLayout) -> Iterator[str]:
    theme, bottom = layout.theme, layout.bottom
    for tick in ticks(layout.scene.makespan_s, 12):
        x = layout.x(tick)
        yield f'<path d="M{x:.1f} {bottom + 4:.1f}v5" stroke="{theme.faint}"/>'
        label = format_seconds(tick).replace(".0 ", " ") if tick else "0"
        yield _text(x, bottom + 22, label, theme.faint, 11, anchor="middle")


def _curves(layout: _TimelineLayout) -> Iterator[str]:
    scene, theme = layout.scene, layout.theme
    top = layout.bottom + _AXIS + 22
    most = max((curve.peak for curve in scene.curves), default=0.0) or 1.0
    fullest = int(np.argmax([curve.peak for curve in scene.curves]))
    what = "Memory" if scene.curves_are_bytes else "Stage activations"
    caption = (
        f"{what} on every rank; most on rank {fullest} (blue): {_amount(scene, scene.curves[fullest].peak)}"
    )
    yield _text(layout.left_x, top - 10, caption, theme.text, 12, weight=600)
    for tick in (byte_ticks if scene.curves_are_bytes else ticks)(most, 4):
        y = top + _CURVES * (1 - tick / most)
        yield f'<path d="M{layout.left_x:.1f} {y:.1f}H{layout.width - _MARGIN:.1f}" stroke="{theme.grid}"/>'
        yield _text(layout.left_x - 10, y + 4, _amount(scene, tick), theme.faint, 11, anchor="end")
    faintness = 0.55 if scene.num_ranks <= 16 else 0.2
    for rank in sorted(range(scene.num_ranks), key=lambda rank: rank == fullest):
        look = (theme.value, 1.8, 1.0) if rank == fullest else (theme.faint, 1.0, faintness)
        path = _steps(layout, scene.curves[rank], top, most)
        drawn = '<path d="{}" fill="none" stroke="{}" stroke-width="{}" stroke-opacity="{}"/>'
        yield drawn.format(path, *look)


def _amount(scene: Scene, value: float) -> str:
    return format_bytes(value) if scene.curves_are_bytes else f"{value:g}"


def _steps(layout: _TimelineLayout, curve: Curve, top: float, most: float) -> str:
    """Return the curve as steps, with only the maximum of each column of pixels."""
    x = layout.left_x + curve.time_s * layout.scale
    column = np.floor(x * 2).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    highest = np.maximum.reduceat(curve.held, starts)
    y = top + _CURVES * (1 - highest / most)
    steps = "".join(f"H{at:.1f}V{height:.1f}" for at, height in zip(x[starts], y, strict=True))
    return f"M{layout.left_x:.1f} {y[0]:.1f}{steps}H{layout.x(layout.scene.makespan_s):.1f}"


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(
    x: float, y: float, text: str, fill: str, size: float, *, weight: int = 400, anchor: str = "start"
) -> str:
    look = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(printable(text))}</text>'


def ticks(extent: float, most: int) -> list[float]:
    """Return round values from 0 to `extent`, in at most `most` steps of 1, 2 or 5 times a power of ten.

    >>> ticks(33.0, 10)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if extent <= 0:
        return [0.0]
    rough = extent / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(int(extent / step + 1e-9) + 1)]


def byte_ticks(extent: float, most: int) -> list[float]:
    """Return values from 0 to `extent`, in at most `most` steps of a power of two bytes.

    >>> byte_ticks(5 * 2**30, 4) == [0, 2 * 2**30, 4 * 2**30]
    True
    """
    if extent <= 0:
        return [0.0]
    step = 2.0 ** math.ceil(math.log2(extent / most))
    return [step * index for index in range(int(extent / step) + 1)]


def png_image(svg: str) -> bytes:
    """Render an SVG document as PNG, two pixels per unit; raise `InputError` if the renderer is not installed."""
    try:
        import resvg_py
    except ImportError:
        raise InputError(
            "PNG images are rendered by a package that is not installed: pip install 'stagewright[pictures]' "
            "(resvg_py, 3 MB), or write --svg and convert that file"
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2.0))
