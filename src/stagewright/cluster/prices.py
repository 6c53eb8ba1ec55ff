"""List prices of the catalog's devices, each with its seller and date."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

Terms = Literal["on-demand", "reserved", "spot"]
TERMS: tuple[Terms, ...] = get_args(Terms)


@dataclass(frozen=True)
class Price:
    """Price in US dollars per device and hour, its seller, and the date of the list (2026-08-26); None if it has none."""

    dollars: float
    source: str
    date: str | None


def list_prices(device: str) -> Mapping[Terms, Price]:
    """Return the known prices of a device of the catalog, by terms.

    >>> sorted(list_prices("h100-pcie")), dict(list_prices("no such device"))
    (['on-demand', 'reserved', 'spot'], {})
    """
    return {
        terms: Price(float(price["dollars"]), price["source"], price["date"].isoformat())
        for terms, price in _document().get(device, {}).items()
    }


@cache
def _document() -> dict:
    text = (resources.files("stagewright.cluster") / "prices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
