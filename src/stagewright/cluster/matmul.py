"""Times of matmuls by shape: tiles, waves over the multiprocessors, split inner dimensions, memory."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from stagewright.cluster.schema import StrictModel
from stagewright.limits import MOST_DEVICES

_TILES = (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)
"""Rows and columns of the tile of results in a multiprocessor's registers. Source: the kernels of cuBLAS and CUTLASS for
tensor cores."""

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of parts into which the inner dimension is split; the partial sums are added afterwards (split-K)."""

_MOST_SPLIT_WAVES = 8
"""Number of waves above which the inner dimension is not split further."""

_STEP = 64
"""Elements of the inner dimension per step of a tile."""

_MEMORY_EFFICIENCY = 0.825
"""Fraction of the memory bandwidth at which operands stream in and results out."""

_GROUPED_MEMORY_EFFICIENCY = 0.9
"""The same for one kernel for matmuls of many experts, whose weights it reads one after the other. Fit of TensorRT-LLM's
layers of experts on H100 and B200 published with aiconfigurator, half of the rows."""

_STORED = 0.46
"""Fraction of the writing of a wave's results during which its multiprocessors are idle."""

_SUM_S = 3.2e-6
"""Seconds of the kernel that adds up the parts of a split matmul."""

_OVERLAP = 2.9
"""Exponent p of the overlap of arithmetic and memory traffic: seconds are (a^p + m^p)^(1/p)."""

_SAG_S = 2.0e-3
"""Time constant with which the clocks of a device that was idle fall."""


_MOST_GROWN = 256
"""Maximum factor of the number of samples that `least_kernel_factor` considers."""

Library = Literal["a100", "h100", "b200"]
"""Kernel library, named by the device whose matmuls were measured."""

_UNALIGNED_SHARE: dict[Library, float] = {"h100": 0.17}
"""Fraction of their rate at which a library computes matmuls in half precision with rows that begin at no multiple of 16
bytes, as logits of an odd vocabulary: Hopper's kernels take none of them, and those of two generations before do. Fit of the
output stages of nanotron's runs on H100. Ignores: that rows at multiples of 4 or 8 bytes lose less."""


class MatmulShape(NamedTuple):
    """`batch` matmuls of rows x inner times inner x columns."""

    batch: float
    rows: float
    columns: float
    inner: float


class MatmulParameters(StrictModel):
    """Parameters of a device for the time of matmuls by shape, besides its peak and `matmul_efficiency`, which is that of
    tiles of 256 x 128 on all multiprocessors."""

    num_multiprocessors: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    operand_share: Annotated[float, Field(ge=0, le=10)] = 0.3
    """Time of loading the operands of a tile of 128 x 128 as a fraction of its arithmetic; other tiles load more or less per
    element."""
    fill_s: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Seconds of every wave before its first multiply-add."""
    tail_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of a full wave's time that the missing tiles of a last wave cost: 1 if a wave waits for all previous
    tiles."""
    boost: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Highest clock over the power-limited clock in training, which is the clock of `matmul_efficiency`."""
    sag: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Factor by which matmuls of more than some milliseconds take longer on a device that was idle, as its clock falls."""
    grouped_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of that rate at which PyTorch's kernel for matmuls of many experts runs; 1 for other kernels."""
    kernels: Library | None = None
    """Library whose measured matmuls give the effect of its choice of kernels in half precision; None: always the
    fastest."""

    def kernel_factor(self, shape: MatmulShape) -> float:
        """Return the factor by which a matmul in half precision takes longer than `shaped_matmul_seconds` with the chosen
        kernel."""
        if self.kernels is None or shape.batch != 1:
            return 1.0
        from stagewright.cluster import kernel_choice  # with numpy, which other uses of a device go without

        return kernel_choice.kernel_factor(
            self.kernels, shape.rows, shape.columns, shape.inner, self.num_multiprocessors
        )

    @property
    def unaligned_share(self) -> float:
        """Fraction of its arithmetic rate at which a matmul in half precision runs whose rows begin at no multiple of 16
        bytes."""
        return 1.0 if self.kernels is None else _UNALIGNED_SHARE.get(self.kernels, 1.0)

    def least_kernel_factor(self, shape: MatmulShape, *, of_weights: bool) -> float:
        """Return the minimum of `kernel_factor` (at most 1) for this number of samples and up to `_MOST_GROWN` times as
        many, in powers of two. Samples are the rows, or the inner dimension for gradients `of_weights`."""
        grown = (2**power for power in range(int(math.log2(_MOST_GROWN)) + 1))
        shapes = (
            shape._replace(inner=times * shape.inner)
            if of_weights
            else shape._replace(rows=times * shape.rows)
            for times in grown
        )
        return min(1.0, *map(self.kernel_factor, shapes))


def shaped_matmul_seconds(
    parameters: MatmulParameters,
    shape: MatmulShape,
    flops: float,
    bandwidth: float,
    num_bytes: float,
    item_bytes: float = 2.0,
    *,
    alone: bool = False,
    grouped: bool = False,
) -> float:
    """Return the seconds of a matmul, or of a batch of them, without its launch, with the fastest tile and split.

    Args: flops: FLOP per second of tiles of 256 x 128 on all multiprocessors. bandwidth: bytes per second of the device's
        memory. num_bytes: bytes read and written. item_bytes: bytes of an element of the result. alone: on a device that
        was idle, instead of one in training. grouped: by one kernel for matmuls of many experts, each with a number of rows
        that only the device knows: it rounds the rows of each up to whole tiles, as here, but does not split the inner
        dimension.

    Source: wave quantization and tile efficiency as in NVIDIA's guide "Matrix Multiplication Background"; the roofline
    model for memory. Constants: fit of the matmuls by shape on A100, H100 and B200 published with aiconfigurator. Ignores:
    layouts; caches; that libraries choose tiles by heuristics (`MatmulParameters.kernel_factor`).
    """
    share, processors = parameters.operand_share, parameters.num_multiprocessors
    clock = (parameters.boost if alone else 1.0) * (parameters.grouped_share if grouped else 1.0)
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
        ends_s = parameters.fill_s + _STORED * rows * columns * item_bytes * processors / memory
        for split, step in inner:
            waves = max(split * whole, 1.0)
            waves += parameters.tail_share * (math.ceil(waves) - waves)
            arithmetic = waves * (step * step_s + ends_s)
            seconds = (arithmetic**_OVERLAP + traffic) ** (1 / _OVERLAP)
            best = min(best, seconds + (_SUM_S + split * sums_s if split > 1 else 0.0))
            if waves > _MOST_SPLIT_WAVES:  # more parts only add sums
                break
    return best * (1 - (parameters.sag - 1) * math.expm1(-best / _SAG_S)) if alone else best
