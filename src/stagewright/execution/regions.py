"""Regions: the boxes of the model's whole tensors that one rank's memory holds, independent of the plan.

A rank holds a tensor whole, as its part of a tensor-parallel one, or as a range of elements of a flat buffer that is
sharded over replicas, which itself may have parts of tensors. All of these are boxes of the whole tensor, each contiguous
in memory, so that another plan can read what one plan has written. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagewright.graph.tensor import TensorMeta
from stagewright.graph.tensor_parallel import TensorShard


@dataclass(frozen=True)
class Region:
    """A box of a tensor: the first index and the number of indices along each dimension.

    >>> Region((2, 0), (3, 4)).overlap(Region((4, 1), (5, 2)))
    Region(start=(4, 1), shape=(1, 2))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection, or None where it is empty."""
        if self.start == other.start and self.shape == other.shape:
            return self
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        stop = (min(a + size, b + length) for a, size, b, length in ends)
        shape = tuple(end - first for end, first in zip(stop, start, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices of this region in a tensor that holds only `outer`.

        >>> Region((4, 1), (1, 2)).within(Region((2, 0), (3, 4)))
        (slice(2, 3, None), slice(1, 3, None))
        """
        inside = zip(self.start, outer.start, self.shape, strict=True)
        return tuple(slice(start - first, start - first + size) for start, first, size in inside)

    def pieces(self, most_elements: int) -> Iterator[Region]:
        """Divide this box into boxes of at most `most_elements` elements.

        >>> [piece.shape for piece in Region((0, 0), (5, 4)).pieces(8)]
        [(2, 4), (2, 4), (1, 4)]
        >>> [piece.start for piece in Region((7, 0), (2, 4)).pieces(3)]
        [(7, 0), (7, 3), (8, 0), (8, 3)]
        """
        if self.num_elements <= most_elements:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        step = max(1, most_elements * self.shape[dim] // self.num_elements)
        for first in range(0, self.shape[dim], step):
            start, shape = list(self.start), list(self.shape)
            start[dim], shape[dim] = start[dim] + first, min(step, shape[dim] - first)
            yield from Region(tuple(start), tuple(shape)).pieces(most_elements)


@dataclass(frozen=True)
class MemoryRange:
    """A box that is contiguous in memory, `offset` elements from the first, with its dimensions in `order`."""

    region: Region
    offset: int
    order: tuple[int, ...]


def memory_ranges(meta: TensorMeta, first: int, stop: int) -> Iterator[MemoryRange]:
    """Divide the elements from `first` to `stop` of a dense tensor into boxes, in memory order; offsets count from `first`.

    >>> for memory_range in memory_ranges(TensorMeta((3, 4), (4, 1), "float32"), 2, 9):
    ...     print(memory_range.region.start, memory_range.region.shape, memory_range.offset)
    (0, 2) (1, 2) 0
    (1, 0) (1, 4) 2
    (2, 0) (1, 1) 6
    """
    order = tuple(sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim)))
    offset = 0
    for box in _boxes(tuple(meta.shape[dim] for dim in order), first, stop):
        start, shape = [0] * len(order), [0] * len(order)
        for place, dim in enumerate(order):
            start[dim], shape[dim] = box.start[place], box.shape[place]
        yield MemoryRange(Region(tuple(start), tuple(shape)), offset, order)
        offset += box.num_elements


def _boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Region]:
    """Divide the elements from `first` to `stop` of a row-major tensor into boxes, in order: the end of a row, whole rows,
    the beginning of a row, and so on along further dimensions."""
    if stop <= first:
        return
    if len(shape) <= 1:
        yield Region((first,), (stop - first,)) if shape else Region((), ())
        return
    row = math.prod(shape[1:])
    (low, skipped), (high, end) = divmod(first, row), divmod(stop, row)
    if low == high:
        yield from _in_row(low, _boxes(shape[1:], skipped, end))
        return
    if skipped:
        yield from _in_row(low, _boxes(shape[1:], skipped, row))
        low += 1
    if low < high:
        yield Region((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    yield from _in_row(high, _boxes(shape[1:], 0, end))


def _in_row(row: int, boxes: Iterator[Region]) -> Iterator[Region]:
    return (Region((row, *box.start), (1, *box.shape)) for box in boxes)


def in_whole(part: Region, shard: TensorShard, num_ranks: int, rank: int) -> Iterator[tuple[Region, Region]]:
    """Map a region of the part of a tensor that `rank` of `num_ranks` holds to the whole tensor: yield each piece as a
    region of the whole and as a region of the part. Padding is left out.

    >>> fused = TensorShard(0, (6, 6))
    >>> for whole, part in in_whole(Region((0,), (6,)), fused, 2, 1):
    ...     print(whole.start, whole.shape, part.start)
    (3,) (3,) (0,)
    (9,) (3,) (3,)
    """
    passed = 0
    for first, stop in shard.ranges(num_ranks, rank):
        size = min(stop, shard.whole_size) - first
        span = Region(_replaced(part.start, shard.dim, passed), _replaced(part.shape, shard.dim, size))
        if (overlapping := part.overlap(span)) is not None:
            moved = overlapping.start[shard.dim] - passed + first
            yield Region(_replaced(overlapping.start, shard.dim, moved), overlapping.shape), overlapping
        passed += stop - first


def _replaced(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])
