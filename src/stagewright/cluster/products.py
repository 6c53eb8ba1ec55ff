"""Seconds of matrix products by their shapes: tiles, waves over the multiprocessors, split sums, memory."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from stagewright.cluster.strict import StrictModel
from stagewright.limits import MOST_DEVICES

_TILES = (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)
"""Rows and columns of the results that a multiprocessor has in its registers at once. Source: the kernels of cuBLAS and
CUTLASS for tensor cores."""

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Parts of the inner dimension that multiprocessors take for themselves, whose sums are added afterwards."""

_MOST_SPLIT_WAVES = 8
"""Where there are more waves than these the inner dimension is not split further."""

_STEP = 64
"""Elements of the inner dimension that a tile goes on by."""

_MEMORY_EFFICIENCY = 0.825
"""Part of the memory bandwidth at which operands stream in and results out."""

_GROUPED_MEMORY_EFFICIENCY = 0.9
"""The same of one kernel for products of many experts, whose weights it reads one after the other. Fit of TensorRT-LLM's
layers of experts on H100 and B200 published with aiconfigurator, half of the rows."""

_STORED = 0.46
"""Part of the writing of a wave's results during which its multiprocessors compute nothing."""

_SUM_S = 3.2e-6
"""Of the kernel that adds up the parts of a split product."""

_OVERLAP = 2.9
"""How well arithmetic hides memory traffic: seconds are (a^p + m^p)^(1/p)."""

_SAG_S = 2.0e-3
"""Time constant with which the clocks of a device that was idle begin to fall."""


_MOST_GROWN = 256
"""Times as many samples as a product has, up to which it is looked at what more of them take."""

Library = Literal["a100", "h100", "b200"]
"""What kernels are made for, by the device whose products were measured."""


class Shape(NamedTuple):
    """`batch` products of rows x inner times inner x columns."""

    batch: float
    rows: float
    columns: float
    inner: float


class Products(StrictModel):
    """What decides how long a device takes for products of different shapes, beside its peak and `matmul_efficiency`, which
    is that of tiles of 256 x 128 on all multiprocessors."""

    num_multiprocessors: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    operand_share: Annotated[float, Field(ge=0, le=10)] = 0.3
    """What loading the operands adds to the arithmetic of a tile of 128 x 128, as a part of it; other tiles load more or
    less for an element."""
    fill_s: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Of every wave, before its first multiply-add."""
    tail_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Part of a last wave that is not full which it takes: 1 where a wave waits for all tiles of the one before."""
    boost: Annotated[float, Field(ge=1, le=10)] = 1.0
    """The highest clock over that which the limit of power leaves a device in training, the clock of `matmul_efficiency`."""
    sag: Annotated[float, Field(ge=1, le=10)] = 1.0
    """How much longer products of more than some milliseconds take on a device that was idle before, as its clock falls."""
    grouped_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of that rate at which PyTorch's kernel for products of many experts runs; that of others is 1."""
    kernels: Library | None = None
    """Whose measured products say what a library's choice of kernels adds in half precision; None: it takes the fastest."""

    def kernel_factor(self, shape: Shape) -> float:
        """How many times as long as `product_seconds` a product in half precision takes with the kernel that is chosen."""
        if self.kernels is None or shape.batch != 1:
            return 1.0
        from stagewright.cluster import kernels  # with numpy, which other uses of a device go without

        return kernels.kernel_factor(
            self.kernels, shape.rows, shape.columns, shape.inner, self.num_multiprocessors
        )

    def least_kernel_factor(self, shape: Shape, *, of_weights: bool) -> float:
        """As `kernel_factor`, the least for so many samples or up to `_MOST_GROWN` times as many, in powers of two: a
        library may choose better than tiles and waves say. Samples are rows, or the sum where gradients are `of_weights`."""
        grown = (2**power for power in range(int(math.log2(_MOST_GROWN)) + 1))
        shapes = (
            shape._replace(inner=times * shape.inner)
            if of_weights
            else shape._replace(rows=times * shape.rows)
            for times in grown
        )
        return min(1.0, *map(self.kernel_factor, shapes))


def product_seconds(
    products: Products,
    shape: Shape,
    flops: float,
    bandwidth: float,
    num_bytes: float,
    item_bytes: float = 2.0,
    *,
    alone: bool = False,
    grouped: bool = False,
) -> float:
    """Time of a product, or of a batch of them, without its launch: that of the tile and split which are the fastest.

    Args:
        flops: FLOP per second of tiles of 256 x 128 on all multiprocessors.
        bandwidth: bytes per second of the device's memory.
        num_bytes: what is read and written.
        item_bytes: of an element of the result.
        alone: on a device that was idle, in place of one in training.
        grouped: by one kernel for products of many experts, each with a number of rows that only the device knows: it rounds
            those of each up to whole tiles, as here, but splits no inner dimension.

    Source: wave quantization and tile efficiency as NVIDIA's guide "Matrix Multiplication Background" describes them; the
    roofline model for memory. Constants: fit of the products by shape on A100, H100 and B200 published with aiconfigurator.
    Ignores: layouts; caches; that libraries choose tiles by rules of thumb (`Products.kernel_factor`).
    """
    share, processors = products.operand_share, products.num_multiprocessors
    clock = (products.boost if alone else 1.0) * (products.grouped_share if grouped else 1.0)
    rate = clock * flops / processors * (1 + share / 2)
    memory = bandwidth * (_GROUPED_MEMORY_EFFICIENCY if grouped else _MEMORY_EFFICIENCY)
    traffic = (num_bytes / memory) ** _OVERLAP
    # Rounded up to whole steps; a split that leaves a part empty is no other one.
    steps = {
        split: math.ceil(shape.inner / split / _STEP) * _STEP
        for split in (_SPLITS[:1] if grouped else _SPLITS)
    }
    inner = [(split, step) for split, step in steps.items() if step * (split - 1) < shape.inner]
    sums_s = 2 * shape.batch * shape.rows * shape.columns / memory
    best = math.inf
    for rows, columns in _TILES:
        whole = shape.batch * math.ceil(shape.rows / rows) * math.ceil(shape.columns / columns) / processors
        step_s = 2 * rows * columns * (1 + share * (128 / rows + 128 / columns - 1)) / rate
        ends_s = products.fill_s + _STORED * rows * columns * item_bytes * processors / memory
        for split, step in inner:
            waves = max(split * whole, 1.0)
            waves += products.tail_share * (math.ceil(waves) - waves)
            arithmetic = waves * (step * step_s + ends_s)
            seconds = (arithmetic**_OVERLAP + traffic) ** (1 / _OVERLAP)
            best = min(best, seconds + (_SUM_S + split * sums_s if split > 1 else 0.0))
            if waves > _MOST_SPLIT_WAVES:  # more parts only add sums
                break
    return best * (1 - (products.sag - 1) * math.expm1(-best / _SAG_S)) if alone else best
