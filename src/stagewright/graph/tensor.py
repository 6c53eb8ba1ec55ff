"""Descriptions of tensors without torch: shape, strides, offset and element type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip

DIFFERENTIABLE = frozenset({"float64", "float32", "bfloat16", "float16", "complex64", "complex128"})


@dataclass(frozen=True)
class TensorMeta:
    """Layout of a tensor: `shape`, `stride` and `offset` count elements of `dtype`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def extent(self) -> int:
        """Elements of storage spanned from `offset` to the last element, gaps included."""
        if self.num_elements == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @cached_property
    def storage_bytes(self) -> int:
        """Bytes of the smallest storage that can hold this layout at its offset.

        >>> TensorMeta((2, 3), (3, 1), "float32").storage_bytes
        24
        >>> TensorMeta((2, 3), (0, 1), "float32").storage_bytes
        12
        """
        return (self.offset + self.extent) * self.item_bytes

    @cached_property
    def num_distinct(self) -> int:
        """Elements that differ in address: dimensions of stride zero count once."""
        return math.prod(
            size for size, step in zip(self.shape, self.stride, strict=True) if step != 0 or size == 0
        )

    @cached_property
    def is_row_major(self) -> bool:
        """Whether each element follows the one before it in the order of the indices."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if stride != step:
                return False
            step *= max(size, 1)
        return True

    @property
    def payload_bytes(self) -> int:
        """Bytes to send so that the tensor can be rebuilt elsewhere: repeated elements are sent once."""
        return self.num_distinct * self.item_bytes

    @property
    def is_differentiable(self) -> bool:
        return self.dtype in DIFFERENTIABLE

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous(shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """The row-major layout of `shape`.

    >>> contiguous((2, 3), "float32").stride
    (3, 1)
    """
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return TensorMeta(tuple(shape), tuple(reversed(stride)), dtype)
