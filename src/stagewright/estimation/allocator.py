"""Model of PyTorch's caching allocator for CUDA: the memory that a sequence of allocations and frees reserves.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.x, with its default settings or expandable segments. Ignores: several
streams, graphs' private pools, garbage collection.

Requests are rounded up to multiples of 512 bytes. Those of at most 1 MiB come from separate segments of 2 MiB; others from
segments of 20 MiB, or, from 10 MiB on, of multiples of 2 MiB. With expandable segments, all small requests share one
segment, which grows by 2 MiB, and all others another, which grows by 20 MiB. Blocks are kept in arrays, which functions
compiled by numba modify.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Ints
from stagewright.compiled import compiled_helper
from stagewright.errors import InputError

ROUND = 512
SMALL = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
LARGE_ROUND = 2 * 2**20

ACTIVE, RESERVED, PEAK_ACTIVE, PEAK_RESERVED, NEXT_ADDRESS, CAPACITY, NUM_SPARE, IS_EXPANDABLE = range(8)
"""Indices of the totals; a capacity of -1 means no limit."""
APART = 2**50
"""Distance between the addresses of the two expandable segments."""
NONE = -1
LEFT, RIGHT = 0, 1


class Blocks(NamedTuple):
    """Blocks by number, with their place in a segment.

    The cached blocks of a pool are a treap, a search tree whose shape is as if they had come in random order: by size, then
    address from left to right, and by `_rank` from top to bottom.
    """

    address: Ints
    size: Ints
    pool: Ints
    """1 for blocks of small requests."""
    is_cached: NDArray[np.bool_]
    before: Ints
    after: Ints
    below: Ints
    """[side, number] the cached blocks to the left and to the right below a cached block."""
    top: Ints
    """The top cached block of each pool."""
    end: Ints
    """The block at the end of each pool's expandable segment."""
    spare: Ints
    """Unused block numbers."""
    totals: Ints

    @classmethod
    def empty(cls, num_blocks: int, capacity_bytes: int | None, is_expandable: bool) -> Blocks:
        """Return arrays for `num_blocks`."""

        def column() -> Ints:
            return np.full(num_blocks, NONE, np.int64)

        totals = np.zeros(8, np.int64)
        totals[CAPACITY] = NONE if capacity_bytes is None else capacity_bytes
        totals[NUM_SPARE], totals[IS_EXPANDABLE] = num_blocks, is_expandable
        return cls(
            address=column(), size=column(), pool=column(), is_cached=np.zeros(num_blocks, np.bool_),
            before=column(), after=column(), below=np.full((2, num_blocks), NONE, np.int64), top=np.full(2, NONE, np.int64),
            end=np.full(2, NONE, np.int64), spare=np.arange(num_blocks)[::-1].copy(), totals=totals,
        )  # fmt: skip

    def grown(self) -> Blocks:
        """Return a copy with twice the capacity."""
        num = len(self.size)

        def doubled(column: Ints) -> Ints:
            return np.concatenate([column, np.full(num, NONE, np.int64)])

        totals, added = self.totals.copy(), np.arange(num, 2 * num)[::-1]
        kept = self.spare[: totals[NUM_SPARE]]
        totals[NUM_SPARE] += num
        padding = np.full(2 * num - len(added) - len(kept), NONE, np.int64)
        return Blocks(
            address=doubled(self.address), size=doubled(self.size), pool=doubled(self.pool),
            is_cached=np.concatenate([self.is_cached, np.zeros(num, np.bool_)]),
            before=doubled(self.before), after=doubled(self.after),
            below=np.concatenate([self.below, np.full((2, num), NONE, np.int64)], axis=1), top=self.top,
            end=self.end, spare=np.concatenate([added, kept, padding]), totals=totals,
        )  # fmt: skip


@compiled_helper
def rounded(num_bytes: int) -> int:
    """Return the size of a block for a request of `num_bytes`.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max((num_bytes + ROUND - 1) // ROUND, 1) * ROUND


@compiled_helper
def segment_bytes(size: int) -> int:
    """Return the size of a new segment for a request of (rounded) `size` that fits in no block.

    >>> segment_bytes(512) // 2**20, segment_bytes(2 * 2**20) // 2**20, segment_bytes(11 * 2**20 + 512) // 2**20
    (2, 20, 12)
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return (size + LARGE_ROUND - 1) // LARGE_ROUND * LARGE_ROUND


@compiled_helper
def allocate(blocks: Blocks, num_bytes: int) -> int:
    """Return the number of a block for a request, or `NONE` if the driver has too little memory.

    There must be two spare numbers.
    """
    size = rounded(num_bytes)
    number = _best_fit(blocks, size)
    if number == NONE:
        number = _segment(blocks, size)
        if number == NONE:
            return NONE
    else:
        _forget(blocks, number)
        if number == blocks.end[blocks.pool[number]]:  # counts as large as it can grow
            other = _best_fit(blocks, size)
            if other != NONE:
                _keep(blocks, number)
                _forget(blocks, other)
                number = other
    _split(blocks, number, size)
    totals = blocks.totals
    totals[ACTIVE] += blocks.size[number]
    totals[PEAK_ACTIVE] = max(totals[PEAK_ACTIVE], totals[ACTIVE])
    return number


@compiled_helper
def free(blocks: Blocks, number: int) -> None:
    """Return a block to the cache; free neighbours become one block."""
    blocks.totals[ACTIVE] -= blocks.size[number]
    before, after = blocks.before[number], blocks.after[number]
    if before != NONE and blocks.is_cached[before]:
        _forget(blocks, before)
        _join(blocks, before, number)
        number = before
    if after != NONE and blocks.is_cached[after]:
        _forget(blocks, after)
        _join(blocks, number, after)
    _keep(blocks, number)


@compiled_helper
def release_cached(blocks: Blocks) -> None:
    """Return unused segments to the driver."""
    for number in range(len(blocks.size)):
        if blocks.is_cached[number] and blocks.before[number] == NONE and blocks.after[number] == NONE:
            _forget(blocks, number)
            blocks.totals[RESERVED] -= blocks.size[number]
            if blocks.end[blocks.pool[number]] == number:
                blocks.end[blocks.pool[number]] = NONE
            _give_back(blocks, number)


class Scripts(NamedTuple):
    """Lists of requests, each for the storages of one holder: `keys` and `sizes`, of which a negative one frees the storage.
    Script `n` is from `bounds[n]` to `bounds[n + 1]`."""

    keys: Ints
    sizes: Ints
    bounds: Ints


@compiled_helper
def run_scripts(
    blocks: Blocks, scripts: Scripts, numbers: Ints, holders: Ints, held: Ints, place: int
) -> int:
    """Run the scripts `numbers`, from the one at `place`, each for its holder, whose blocks are a row of `held`, by key.

    Returns the place of the first script for which there are not two spare numbers for each request; their number if there
    is none.
    """
    while place < len(numbers):
        begin, end = scripts.bounds[numbers[place]], scripts.bounds[numbers[place] + 1]
        if blocks.totals[NUM_SPARE] < 2 * (end - begin):
            break
        holder = holders[place]
        for request in range(begin, end):
            key, size = scripts.keys[request], scripts.sizes[request]
            if size < 0:
                free(blocks, int(held[holder, key]))
                held[holder, key] = NONE
            else:
                held[holder, key] = allocate(blocks, size)
        place += 1
    return place


@compiled_helper
def _best_fit(blocks: Blocks, size: int) -> int:
    """Return the cached block of minimum size, then address, that `size` fits in."""
    best, number = NONE, blocks.top[int(size <= SMALL)]
    while number != NONE:
        if blocks.size[number] < size:
            number = blocks.below[RIGHT, number]
        else:
            best, number = number, blocks.below[LEFT, number]
    return int(best)


@compiled_helper
def _segment(blocks: Blocks, size: int) -> int:
    totals, pool = blocks.totals, int(size <= SMALL)
    wanted = _missing_bytes(blocks, pool, size)
    if totals[CAPACITY] >= 0 and totals[RESERVED] + wanted > totals[CAPACITY]:
        release_cached(blocks)
        wanted = _missing_bytes(blocks, pool, size)
        if totals[RESERVED] + wanted > totals[CAPACITY]:
            return NONE
    totals[RESERVED] += wanted
    totals[PEAK_RESERVED] = max(totals[PEAK_RESERVED], totals[RESERVED])
    if totals[IS_EXPANDABLE]:
        return _grown(blocks, pool, wanted)
    number = _new(blocks, totals[NEXT_ADDRESS], wanted, pool)
    totals[NEXT_ADDRESS] += wanted
    return number


@compiled_helper
def _missing_bytes(blocks: Blocks, pool: int, size: int) -> int:
    """Return the bytes to reserve for a request of `size` that fits in no block."""
    if not blocks.totals[IS_EXPANDABLE]:
        return segment_bytes(size)
    end, page = int(blocks.end[pool]), SMALL_SEGMENT if pool == 1 else LARGE_SEGMENT
    lacking = size - blocks.size[end] if end != NONE and blocks.is_cached[end] else size
    return int((lacking + page - 1) // page * page)


@compiled_helper
def _grown(blocks: Blocks, pool: int, num_bytes: int) -> int:
    """Map `num_bytes` more at the end of a pool's expandable segment; return its last block, which is not in the cache."""
    end = int(blocks.end[pool])
    if end != NONE and blocks.is_cached[end]:
        _forget(blocks, end)
        blocks.size[end] += num_bytes
        return end
    address = pool * APART if end == NONE else blocks.address[end] + blocks.size[end]
    number = _new(blocks, address, num_bytes, pool)
    blocks.before[number], blocks.end[pool] = end, number
    if end != NONE:
        blocks.after[end] = number
    return number


@compiled_helper
def _split(blocks: Blocks, number: int, size: int) -> None:
    remainder, pool = blocks.size[number] - size, blocks.pool[number]
    if remainder < ROUND if pool == 1 or blocks.totals[IS_EXPANDABLE] else remainder <= SMALL:
        return
    other = _new(blocks, blocks.address[number] + size, remainder, pool)
    next_block = blocks.after[number]
    blocks.before[other], blocks.after[other] = number, next_block
    if next_block != NONE:
        blocks.before[next_block] = other
    blocks.size[number], blocks.after[number] = size, other
    if blocks.end[pool] == number:
        blocks.end[pool] = other
    _keep(blocks, other)


@compiled_helper
def _join(blocks: Blocks, first: int, second: int) -> None:
    """Merge the second block into the first, which comes directly before it."""
    next_block = blocks.after[second]
    blocks.size[first] += blocks.size[second]
    blocks.after[first] = next_block
    if next_block != NONE:
        blocks.before[next_block] = first
    if blocks.end[blocks.pool[second]] == second:
        blocks.end[blocks.pool[second]] = first
    _give_back(blocks, second)


@compiled_helper
def _new(blocks: Blocks, address: int, size: int, pool: int) -> int:
    totals = blocks.totals
    totals[NUM_SPARE] -= 1
    number = int(blocks.spare[totals[NUM_SPARE]])
    blocks.address[number], blocks.size[number], blocks.pool[number] = address, size, pool
    blocks.before[number] = blocks.after[number] = NONE
    return number


@compiled_helper
def _give_back(blocks: Blocks, number: int) -> None:
    blocks.spare[blocks.totals[NUM_SPARE]] = number
    blocks.totals[NUM_SPARE] += 1


@compiled_helper
def _comes_before(blocks: Blocks, first: int, second: int) -> bool:
    sizes = blocks.size
    if sizes[first] == sizes[second]:
        return bool(blocks.address[first] < blocks.address[second])
    return bool(sizes[first] < sizes[second])


@compiled_helper
def _rank(number: int) -> int:
    """Return the priority of a block: a hash of its number, as if at random."""
    return (number * 2654435761) & 0xFFFFFFFF


@compiled_helper
def _below(blocks: Blocks, side: int, number: int) -> int:
    """Return the cached block on a side below another, or `NONE`."""
    return int(blocks.below[side, number])


@compiled_helper
def _set_below(blocks: Blocks, pool: int, above: int, side: int, number: int) -> None:
    """Put a cached block, or none, below `above`; on top of the pool if that is none."""
    if above == NONE:
        blocks.top[pool] = number
    else:
        blocks.below[side, above] = number


@compiled_helper
def _keep(blocks: Blocks, number: int) -> None:
    """Insert a block into its pool, above what has a lower rank, which it parts in two."""
    pool, below = int(blocks.pool[number]), blocks.below
    above, side, lower = NONE, LEFT, int(blocks.top[pool])
    while lower != NONE and _rank(lower) > _rank(number):
        above, side = lower, int(_comes_before(blocks, lower, number))
        lower = _below(blocks, side, lower)
    _set_below(blocks, pool, above, side, number)
    smaller, smaller_side, larger, larger_side = number, LEFT, number, RIGHT
    while lower != NONE:
        if _comes_before(blocks, lower, number):
            below[smaller_side, smaller] = lower
            smaller, smaller_side, lower = lower, RIGHT, _below(blocks, RIGHT, lower)
        else:
            below[larger_side, larger] = lower
            larger, larger_side, lower = lower, LEFT, _below(blocks, LEFT, lower)
    below[smaller_side, smaller] = below[larger_side, larger] = NONE
    blocks.is_cached[number] = True


@compiled_helper
def _forget(blocks: Blocks, number: int) -> None:
    """Remove a block from its pool and join the two parts below it."""
    pool = int(blocks.pool[number])
    above, side, other = NONE, LEFT, int(blocks.top[pool])
    while other != number:
        above, side = other, int(_comes_before(blocks, other, number))
        other = _below(blocks, side, other)
    smaller, larger = _below(blocks, LEFT, number), _below(blocks, RIGHT, number)
    while smaller != NONE and larger != NONE:
        if _rank(smaller) > _rank(larger):
            _set_below(blocks, pool, above, side, smaller)
            above, side, smaller = smaller, RIGHT, _below(blocks, RIGHT, smaller)
        else:
            _set_below(blocks, pool, above, side, larger)
            above, side, larger = larger, LEFT, _below(blocks, LEFT, larger)
    _set_below(blocks, pool, above, side, larger if smaller == NONE else smaller)
    blocks.is_cached[number] = False


_AT_FIRST = 256
"""Initial capacity in blocks."""


class Block(NamedTuple):
    """A part of a segment, in use until it is freed."""

    number: int
    address: int
    size: int


class CachingAllocator:
    """State of the allocator of one device; bytes are counted as in PyTorch's memory statistics.

    Args:
        capacity_bytes: memory of the driver; None: no limit.
        is_expandable: with expandable segments. Ignores: that pages in the middle of them are unmapped when the driver runs
            out; `release_cached` returns whole segments alone.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)
    >>> allocator.active_bytes // 2**20, allocator.reserved_bytes // 2**20
    (3, 20)
    >>> allocator.free(block); allocator.active_bytes, allocator.reserved_bytes // 2**20
    (0, 20)
    """

    def __init__(self, capacity_bytes: int | None = None, is_expandable: bool = False) -> None:
        self._blocks = Blocks.empty(_AT_FIRST, capacity_bytes, is_expandable)

    @property
    def active_bytes(self) -> int:
        return int(self._blocks.totals[ACTIVE])

    @property
    def reserved_bytes(self) -> int:
        return int(self._blocks.totals[RESERVED])

    @property
    def peak_active_bytes(self) -> int:
        return int(self._blocks.totals[PEAK_ACTIVE])

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self._blocks.totals[PEAK_RESERVED])

    def allocate(self, num_bytes: int) -> Block:
        """Return a block for `num_bytes`: the smallest cached one that fits, or one in a new segment.

        Raises:
            InputError: the driver has too little memory left, even after cached segments are returned.
        """
        if self._blocks.totals[NUM_SPARE] < 2:
            self._blocks = self._blocks.grown()
        number = allocate(self._blocks, num_bytes)
        if number == NONE:
            raise self._lacks(num_bytes)
        return Block(number, int(self._blocks.address[number]), int(self._blocks.size[number]))

    def free(self, block: Block) -> None:
        """Return `block` to the cache; free neighbours become one block."""
        free(self._blocks, block.number)

    def run(self, scripts: Scripts, numbers: Ints, holders: Ints, held: Ints) -> None:
        """Run scripts one after the other, each for its holder, whose blocks are a row of `held`, by key. There must be no
        limit of memory."""
        assert self._blocks.totals[CAPACITY] == NONE
        place = 0
        while (place := run_scripts(self._blocks, scripts, numbers, holders, held, place)) < len(numbers):
            self._blocks = self._blocks.grown()

    def release_cached(self) -> None:
        """Return unused segments to the driver."""
        release_cached(self._blocks)

    def _lacks(self, num_bytes: int) -> InputError:
        capacity = int(self._blocks.totals[CAPACITY])
        return InputError(
            f"an allocation of {rounded(num_bytes)} bytes does not fit: {self.reserved_bytes} of {capacity} bytes are "
            "reserved: use smaller microbatches or more devices"
        )
