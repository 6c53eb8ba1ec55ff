"""Write the tables by which `stagewright.cluster.kernel_choice` corrects products: of each device half of the measured ones.

    python validation/kernel_tables.py FOLDER

A Gaussian process of the logarithm of measured over predicted seconds, both without the launch: products are alike by their
coordinates, and what that does not explain is noise, more for the few that lie far from all like them (a library's odd
choice). Scales, spread and noise were chosen by eight-fold cross-validation inside that half, which this prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from products import LARGE_FLOP, judged
from verdict import Row

from stagewright.cluster import load_cluster
from stagewright.cluster.kernel_choice import Floats, coordinates, likeness

_SPREAD, _NOISE = 0.095, 0.04
"""Of the logarithm: what products have in common with those like them, and what each has for itself."""

_FAR, _ROUNDS = 1.5, 2
"""Deviations over the usual one from which on a product counts less, and how often that is found anew."""

_MOST = 0.4
"""Logarithms beyond are taken for it."""

_FOLDS = 8

_TABLES = {"a100-80": "a100", "h100": "h100", "b200": "b200"}
"""Devices and the names of their tables."""


@dataclass(frozen=True)
class _Measured:
    """Products of a device, one a row: shapes, seconds measured and predicted without the table, launch and all."""

    num_multiprocessors: int
    shapes: Floats
    seconds: Floats
    predicted: Floats
    launch_s: float

    @property
    def points(self) -> Floats:
        rows, columns, inner = self.shapes.T
        return coordinates(rows, columns, inner, self.num_multiprocessors)

    @property
    def logarithms(self) -> Floats:
        """Of what the table is to say."""
        ratios = np.maximum(self.seconds - self.launch_s, self.launch_s / 10) / (
            self.predicted - self.launch_s
        )
        return np.clip(np.log(ratios), -_MOST, _MOST)


def _measured(name: str, rows: Sequence[Row]) -> _Measured:
    device = load_cluster(f"1x-{name}").device
    assert device.products is not None
    of_device = [row for row in rows if row.half == "fit" and row.group.startswith(f"{name}:")]
    shapes = np.array([row.label.split()[1::2] for row in of_device], float)
    predicted = np.array([row.predicted for row in of_device])
    return _Measured(
        device.products.num_multiprocessors,
        shapes,
        np.array([row.measured for row in of_device]),
        predicted,
        device.launch_overhead_s,
    )


def _weights(points: Floats, logarithms: Floats) -> Floats:
    """Of each product in the sum that corrects one like it."""
    covariance = _SPREAD**2 * likeness(points, points)
    noise = np.full(len(points), _NOISE**2)
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(covariance + np.diag(noise))
        unexplained = inverse @ logarithms / np.diag(inverse)  # what all others do not say of each
        usual = 1.48 * np.median(np.abs(unexplained))
        noise = _NOISE**2 * (1 + (unexplained / (_FAR * usual)) ** 2)
    return np.asarray(_SPREAD**2 * np.linalg.solve(covariance + np.diag(noise), logarithms), float)


def _cross_validated(measured: _Measured) -> Floats:
    """Relative errors of every product by tables that did not see it."""
    points, logarithms = measured.points, measured.logarithms
    fold = np.random.default_rng(1).integers(0, _FOLDS, len(points))
    said = np.zeros(len(points))
    for number in range(_FOLDS):
        seen = fold != number
        said[~seen] = likeness(points[~seen], points[seen]) @ _weights(points[seen], logarithms[seen])
    predicted = measured.launch_s + (measured.predicted - measured.launch_s) * np.exp(said)
    return np.abs(predicted / measured.seconds - 1)


def _document(name: str, measured: _Measured) -> str:
    lines = [
        f'source = "weights of half of the matmuls by shape on {name.upper()} published with '
        'github.com/ai-dynamo/aiconfigurator (095f58a5), by validation/kernel_tables.py"',
        f"num_multiprocessors = {measured.num_multiprocessors}",
        "products = [  # rows, columns, inner, weight",
    ]
    weights = _weights(measured.points, measured.logarithms)
    for (rows, columns, inner), weight in zip(measured.shapes.astype(int), weights, strict=True):
        lines.append(f"  [{rows}, {columns}, {inner}, {weight:.4f}],")
    return "\n".join([*lines, "]", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the tables are written")
    options = parser.parse_args()
    rows = list(judged(kernels=False))
    for device, name in _TABLES.items():
        measured = _measured(device, rows)
        errors, large = _cross_validated(measured), 2 * measured.shapes.prod(axis=1) >= LARGE_FLOP
        print(f"{device}: {errors.mean():.2%} of all, {errors[large].mean():.2%} of 20 GFLOP or more")
        (options.folder / f"{name}.toml").write_text(_document(name, measured), encoding="utf-8")


if __name__ == "__main__":
    main()
