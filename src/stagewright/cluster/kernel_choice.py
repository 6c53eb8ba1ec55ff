"""Effect of a library's choice of kernels on the time of a matmul, interpolated between measured ones."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster.matmul import Library

_SCALES = np.array([1.0, 0.3, 0.3, 0.3, 2.5, 1.0])
"""Length scales of `coordinates`: matmuls at distance one are hardly similar. Chosen by cross-validation on half of the
measured matmuls.
"""


def coordinates(
    rows: Floats | float, columns: Floats | float, inner: Floats | float, num_multiprocessors: int
) -> Floats:
    """Return the features of the choice, in the last dimension: the inner dimension, the arithmetic that whole waves of
    tiles of 128 x 256 and of 128 x 128 add, the rows and columns that rounding up to 256 adds, and tiles per
    multiprocessor; all as logarithms over `_SCALES`.
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
    """Return the similarity of all pairs of `some` and `others` by their coordinates: 1 for equal ones, 0 far away.

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
    """Return the time of a matmul in half precision over its time by tiles, waves and memory
    (`stagewright.cluster.matmul`); 1 for matmuls that are not similar to any measured one.

    Source: Gaussian process regression (Rasmussen and Williams, chapter 2) of measured over predicted times;
    `validation/kernel_tables.py` solves it. Ignores: layouts of the operands, releases of the library.
    """
    if min(rows, columns, inner) < 1:
        return 1.0
    points, weights = _table(library)
    point = coordinates(rows, columns, inner, num_multiprocessors)
    return math.exp(likeness(point[None], points)[0] @ weights)


@cache
def _table(library: Library) -> tuple[Floats, Floats]:
    """Return the coordinates of the measured matmuls, and their weights."""
    file = resources.files("stagewright.cluster") / "catalog" / "kernels" / f"{library}.toml"
    held = tomllib.loads(file.read_text(encoding="utf-8"))
    matmuls: Sequence[Sequence[float]] = held["products"]
    rows, columns, inner, weights = np.array(matmuls, float).T
    return coordinates(rows, columns, inner, held["num_multiprocessors"]), weights
