"""PyTorch's caching allocator for CUDA: what a sequence of allocations and frees reserves from the driver.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.x with its default settings. Ignores: expandable segments, several
streams, graphs' private pools, garbage collection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from stagewright.errors import InputError

ROUND = 512
"""Every request is rounded up to whole multiples of this."""
SMALL = 2**20
"""Requests of at most this many bytes come from segments of their own."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
"""A segment for requests below `OWN_SEGMENT`; larger ones get a segment of whole multiples of 2 MiB."""
OWN_SEGMENT = 10 * 2**20
LARGE_ROUND = 2 * 2**20


def rounded(num_bytes: int) -> int:
    """What a request of `num_bytes` takes of a block.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(-(-num_bytes // ROUND), 1) * ROUND


def segment_bytes(size: int) -> int:
    """What is asked of the driver when no block fits a request of (rounded) `size`.

    >>> segment_bytes(512) // 2**20, segment_bytes(2 * 2**20) // 2**20, segment_bytes(11 * 2**20 + 512) // 2**20
    (2, 20, 12)
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // LARGE_ROUND) * LARGE_ROUND


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; its neighbours in the segment are `before` and `after`."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class CachingAllocator:
    """State of one device's allocator; bytes are counted as PyTorch's memory statistics count them.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)
    >>> allocator.active_bytes // 2**20, allocator.reserved_bytes // 2**20
    (3, 20)
    >>> allocator.free(block); allocator.active_bytes, allocator.reserved_bytes // 2**20
    (0, 20)
    """

    capacity_bytes: int | None = None
    """What the driver can give; None: no limit."""
    active_bytes: int = 0
    reserved_bytes: int = 0
    peak_active_bytes: int = 0
    peak_reserved_bytes: int = 0
    _next_address: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, Block] = field(default_factory=dict)

    def allocate(self, num_bytes: int) -> Block:
        """A block for `num_bytes`: the smallest cached one that fits, or a new segment.

        Raises:
            InputError: the driver has too little memory left, even after cached segments are returned.
        """
        size = rounded(num_bytes)
        block = self._cached(size) or self._segment(size)
        self._split(block, size)
        self.active_bytes += block.size
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return `block` to the cache; free neighbours become one block."""
        self.active_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._forget(other)
                block = _merged(block, other)
        self._keep(block)

    def release_cached(self) -> None:
        """Return the segments that nothing uses to the driver (`torch.cuda.empty_cache`)."""
        for is_small in (True, False):
            for _, address in list(self._free[is_small]):
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    self._forget(block)
                    self.reserved_bytes -= block.size

    def _cached(self, size: int) -> Block | None:
        candidates = self._free[size <= SMALL]
        place = bisect_left(candidates, (size, -1))
        if place == len(candidates):
            return None
        block = self._blocks[candidates[place][1]]
        self._forget(block)
        return block

    def _segment(self, size: int) -> Block:
        wanted = segment_bytes(size)
        if self.capacity_bytes is not None and self.reserved_bytes + wanted > self.capacity_bytes:
            self.release_cached()
            if self.reserved_bytes + wanted > self.capacity_bytes:
                raise InputError(
                    f"an allocation of {size} bytes does not fit: {self.reserved_bytes} of {self.capacity_bytes} bytes "
                    "are reserved: use smaller microbatches or more devices"
                )
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, wanted, size <= SMALL)
        self._next_address += wanted
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUND if block.is_small else rest <= SMALL:
            return
        other = Block(block.address + size, rest, block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.size, block.after = size, other
        self._keep(other)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        insort(self._free[block.is_small], (block.size, block.address))

    def _forget(self, block: Block) -> None:
        block.is_free = False
        del self._blocks[block.address]
        blocks = self._free[block.is_small]
        del blocks[bisect_left(blocks, (block.size, block.address))]


def _merged(block: Block, other: Block) -> Block:
    first, second = (other, block) if other.address < block.address else (block, other)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
