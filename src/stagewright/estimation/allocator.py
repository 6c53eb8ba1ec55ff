"""PyTorch's caching allocator for CUDA: what a sequence of allocations and frees reserves from the driver.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.x with its default settings. Ignores: expandable segments, several
streams, graphs' private pools, garbage collection.

Requests are rounded up to whole multiples of 512 bytes. Those of at most 1 MiB come from segments of their own, of 2 MiB;
others from segments of 20 MiB, or from 10 MiB on of whole multiples of 2 MiB.
"""

from __future__ import annotations

from typing import NamedTuple

from stagewright.errors import InputError
from stagewright.estimation import allocator_kernels as kernels
from stagewright.estimation.allocator_kernels import Blocks, Ints

_AT_FIRST = 256
"""Blocks there is room for."""


def rounded(num_bytes: int) -> int:
    """What a request of `num_bytes` takes of a block.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return kernels.rounded(num_bytes)


def segment_bytes(size: int) -> int:
    """What is asked of the driver when no block fits a request of (rounded) `size`.

    >>> segment_bytes(512) // 2**20, segment_bytes(2 * 2**20) // 2**20, segment_bytes(11 * 2**20 + 512) // 2**20
    (2, 20, 12)
    """
    return kernels.segment_bytes(size)


class Block(NamedTuple):
    """A part of a segment, in use until it is freed."""

    number: int
    address: int
    size: int


class CachingAllocator:
    """State of one device's allocator; bytes are counted as PyTorch's memory statistics count them.

    Args:
        capacity_bytes: what the driver can give; None: no limit.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)
    >>> allocator.active_bytes // 2**20, allocator.reserved_bytes // 2**20
    (3, 20)
    >>> allocator.free(block); allocator.active_bytes, allocator.reserved_bytes // 2**20
    (0, 20)
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._blocks = Blocks.empty(_AT_FIRST, capacity_bytes)

    @property
    def active_bytes(self) -> int:
        return int(self._blocks.totals[kernels.ACTIVE])

    @property
    def reserved_bytes(self) -> int:
        return int(self._blocks.totals[kernels.RESERVED])

    @property
    def peak_active_bytes(self) -> int:
        return int(self._blocks.totals[kernels.PEAK_ACTIVE])

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self._blocks.totals[kernels.PEAK_RESERVED])

    def allocate(self, num_bytes: int) -> Block:
        """A block for `num_bytes`: the smallest cached one that fits, or a new segment.

        Raises:
            InputError: the driver has too little memory left, even after cached segments are returned.
        """
        self._make_room(1)
        number = kernels.allocate(self._blocks, num_bytes)
        if number == kernels.NONE:
            raise self._lacks(num_bytes)
        return Block(number, int(self._blocks.address[number]), int(self._blocks.size[number]))

    def free(self, block: Block) -> None:
        """Return `block` to the cache; free neighbours become one block."""
        kernels.free(self._blocks, block.number)

    def run(self, keys: Ints, sizes: Ints, held: Ints) -> None:
        """Allocate `sizes` in turn, which `held` then has by their `keys`; a size below 0 frees the block of its key.

        Raises:
            InputError: as `allocate` does.
        """
        self._make_room(len(keys))
        done = kernels.run_script(self._blocks, keys, sizes, held)
        if done < len(keys):
            raise self._lacks(int(sizes[done]))

    def release_cached(self) -> None:
        """Return the segments that nothing uses to the driver (`torch.cuda.empty_cache`)."""
        kernels.release_cached(self._blocks)

    def _make_room(self, num_requests: int) -> None:
        while self._blocks.totals[kernels.NUM_SPARE] < 2 * num_requests:
            self._blocks = self._blocks.grown()

    def _lacks(self, num_bytes: int) -> InputError:
        capacity = int(self._blocks.totals[kernels.CAPACITY])
        return InputError(
            f"an allocation of {rounded(num_bytes)} bytes does not fit: {self.reserved_bytes} of {capacity} bytes are "
            "reserved: use smaller microbatches or more devices"
        )
