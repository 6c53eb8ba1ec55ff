"""How much longer or shorter a library's choice of kernels makes a product, interpolated between measured products."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster.products import Library

Floats = NDArray[np.float64]

_SCALES = np.array([1.0, 0.3, 0.3, 0.3, 2.5, 1.0])
"""Of `coordinates`, in which products that are one apart are hardly alike. Chosen by cross-validation of half of the
measured products.
"""


def coordinates(
    rows: Floats | float, columns: Floats | float, inner: Floats | float, num_multiprocessors: int
) -> Floats:
    """What the choice depends on, in the last dimension: the depth, what whole waves of tiles of 128 x 256 and of 128 x 128
    add to the arithmetic, what rounding up to 256 adds to rows and to columns, and tiles for each multiprocessor; all
    logarithms over `_SCALES`.
    """
    rows, columns, inner = np.asarray(rows, float), np.asarray(columns, float), np.asarray(inner, float)

    def tiles(width: int) -> Floats:
        return np.ceil(rows / 128) * np.ceil(columns / width) / num_multiprocessors

    def added(width: int) -> Floats:
        return np.ceil(tiles(width)) * num_multiprocessors * 128 * width / (rows * columns)

    rounded = [np.ceil(size / 256) * 256 / size for size in (rows, columns)]
    ratios = np.stack((inner, added(256), added(128), rounded[0], tiles(128), rounded[1]), axis=-1)
    return np.log(ratios) / _SCALES


def likeness(some: Floats, others: Floats) -> Floats:
    """Of every product of `some` with every one of `others`, by their coordinates: 1 of a product with itself, 0 far away.

    Source: the Matern covariance of smoothness 3/2 (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
    section 4.2).
    """
    squares = (some**2).sum(-1)[:, None] + (others**2).sum(-1) - 2.0 * some @ others.T
    apart = np.sqrt(3.0 * np.maximum(squares, 0.0))
    return (1.0 + apart) * np.exp(-apart)


@lru_cache(maxsize=2**16)
def kernel_factor(
    library: Library, rows: float, columns: float, inner: float, num_multiprocessors: int
) -> float:
    """The time of a product in half precision over what tiles, waves and memory say (`stagewright.cluster.products`); 1 for
    products unlike any that was measured.

    Source: Gaussian process regression (Rasmussen and Williams, chapter 2) of what measured products took over what was
    predicted; `validation/kernel_tables.py` solves it. Ignores: layouts of the operands, releases of the library.
    """
    if min(rows, columns, inner) < 1:
        return 1.0
    points, weights = _table(library)
    asked = coordinates(rows, columns, inner, num_multiprocessors)
    return math.exp(likeness(asked[None], points)[0] @ weights)


@cache
def _table(library: Library) -> tuple[Floats, Floats]:
    """Coordinates of the measured products, and the weights of each."""
    file = resources.files("stagewright.cluster") / "catalog" / "kernels" / f"{library}.toml"
    held = tomllib.loads(file.read_text(encoding="utf-8"))
    products: Sequence[Sequence[float]] = held["products"]
    rows, columns, inner, weights = np.array(products, float).T
    return coordinates(rows, columns, inner, held["num_multiprocessors"]), weights
