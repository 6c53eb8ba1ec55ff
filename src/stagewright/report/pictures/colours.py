"""Colours of timetables: one hue per kind of action, for light and dark themes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat

from stagewright.schedule import Kind

_LOOKS = {
    Kind.F: ("forward", "#3a6fd8"),
    Kind.B: ("backward", "#2f9461"),
    Kind.I: ("input gradient", "#1591a3"),
    Kind.W: ("weight gradient", "#a04fc4"),
    Kind.R: ("recompute", "#c98a12"),
    Kind.SEND_F: ("send value", "#3a6fd8"),
    Kind.RECV_F: ("post receive of value", "#3a6fd8"),
    Kind.SEND_B: ("send gradient", "#2f9461"),
    Kind.RECV_B: ("post receive of gradient", "#2f9461"),
    Kind.GATHER: ("gather weights", "#7b8494"),
    Kind.RELEASE: ("release weights", "#7b8494"),
    Kind.REDUCE: ("reduce gradients", "#d0573f"),
    Kind.STEP: ("optimizer step", "#5b6472"),
}
NAMES = {kind: name for kind, (name, _) in _LOOKS.items()}
FILLS = {kind: fill for kind, (_, fill) in _LOOKS.items()}
"""Colours of the first stage of a rank; `shade` lightens them for further stages."""

_CATEGORIES = {
    "parameters": "#3a6fd8",
    "weight versions": "#0d5279",
    "gradients": "#2f9461",
    "optimizer": "#c98a12",
    "master": "#a04fc4",
    "constants": "#7b8494",
    "workspace": "#b3a16a",
    "gathered": "#47c7f8",
    "whole gradients": "#6bd36d",
    "reducing": "#0a5e14",
    "gradient shards": "#1591a3",
    "inputs": "#7b5e1c",
    "activations": "#d0573f",
    "recomputed": "#d5ada2",
    "transient": "#f98ae0",
    "boundary": "#74364b",
}
"""Colours of memory categories, distinct in both themes."""
_UNKNOWN = "#9aa3b0"

_LIGHTEST = 0.46


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of everything but the actions."""

    ground: str
    idle: str
    text: str
    faint: str
    grid: str
    value: str
    gradient: str


LIGHT = Theme("#ffffff", "#f1f3f6", "#1c2430", "#697386", "#dfe3ea", "#3a6fd8", "#2f9461")
DARK = Theme("#13171d", "#1d232b", "#e6e9ee", "#8f99a8", "#2b333d", "#7fa5f5", "#63c596")
THEMES = {"light": LIGHT, "dark": DARK}


def category_fills(names: Iterable[str]) -> dict[str, str]:
    """Return the colours of memory categories: fixed ones for those of the estimator, unused ones for others.

    >>> category_fills(["activations", "cache"])
    {'activations': '#d0573f', 'cache': '#3a6fd8'}
    """
    wanted = dict.fromkeys(names)
    spare = chain((fill for name, fill in _CATEGORIES.items() if name not in wanted), repeat(_UNKNOWN))
    return {name: _CATEGORIES[name] if name in _CATEGORIES else next(spare) for name in wanted}


def shade(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the fill of an action on the `chunk`-th stage of its rank.

    >>> shade(Kind.F, 0, 2), shade(Kind.F, 1, 2)
    ('#3a6fd8', '#95b1ea')
    """
    part = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    channels = (int(FILLS[kind][index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * part):02x}" for channel in channels)


def ink(chunk: int, num_chunks: int) -> str:
    """Return the colour of text on `shade`.

    >>> ink(0, 1), ink(1, 2)
    ('#ffffff', '#10151c')
    """
    return "#ffffff" if _LIGHTEST * chunk / max(num_chunks - 1, 1) < 0.25 else "#10151c"
