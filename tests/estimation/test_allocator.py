"""The model of PyTorch's caching allocator, against sequences worked out by hand from its rules."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.errors import InputError
from stagewright.estimation.allocator import NEXT_ADDRESS, SMALL, Block, CachingAllocator, rounded

MIB = 2**20


def test_a_freed_block_is_split_for_a_smaller_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB))
    first, second = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    assert (first.size, second.size, allocator.reserved_bytes) == (40 * MIB, 24 * MIB, 64 * MIB)


def test_a_rest_of_at_most_one_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB))
    assert allocator.allocate(63 * MIB).size == 64 * MIB


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * MIB), allocator.allocate(60 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(60 * MIB).address == small.address


def test_blocks_that_grow_reserve_anew() -> None:
    allocator = CachingAllocator()
    for size in (20, 30, 40):
        allocator.free(allocator.allocate(size * MIB))
    assert allocator.peak_active_bytes == 40 * MIB
    assert allocator.peak_reserved_bytes == 90 * MIB


def test_cached_segments_return_to_the_driver_before_it_runs_out() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    block = allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(InputError, match="does not fit"):
        allocator.allocate(40 * MIB)
    allocator.free(block)


def test_an_expandable_segment_grows_where_others_would_be_reserved() -> None:
    """Rest of pages, then the free block at the end, then pages of 20 MiB; small requests have a segment of their own."""
    allocator = CachingAllocator(is_expandable=True)
    for size in (20, 30, 40):
        allocator.free(allocator.allocate(size * MIB))
    assert allocator.peak_active_bytes == allocator.peak_reserved_bytes == 40 * MIB
    first, second, last = (allocator.allocate(size * MIB) for size in (15, 15, 15))
    assert (first.address, second.address, last.address) == (0, 15 * MIB, 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    small = allocator.allocate(512)
    assert allocator.reserved_bytes == 62 * MIB and small.address > 2**40
    allocator.free(last)
    allocator.free(first)  # 15 MiB at the start and 30 MiB at the end are free
    assert allocator.allocate(10 * MIB).address == 0
    assert allocator.allocate(4 * MIB).address == 10 * MIB  # rests of any size are split off
    assert allocator.allocate(35 * MIB).address == 30 * MIB
    assert allocator.reserved_bytes == 82 * MIB


def test_the_end_of_an_expandable_segment_is_used_last() -> None:
    """It counts as large as it can grow, also where it is the smallest free block that fits."""
    allocator = CachingAllocator(is_expandable=True)
    first, _, rest = allocator.allocate(30 * MIB), allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.free(first)
    allocator.free(rest)
    assert allocator.allocate(4 * MIB).address == 0
    assert allocator.allocate(27 * MIB).address == 35 * MIB


@pytest.mark.parametrize("is_expandable", [False, True])
@given(requests=st.lists(st.tuples(st.integers(1, 60 * MIB), st.booleans()), max_size=60))
def test_bytes_add_up_whatever_is_allocated(requests: list[tuple[int, bool]], is_expandable: bool) -> None:
    allocator = CachingAllocator(is_expandable=is_expandable)
    live = []
    for size, frees in requests:
        live.append(allocator.allocate(size))
        if frees:
            allocator.free(live.pop(0))
        assert allocator.active_bytes == sum(block.size for block in live) >= 0
        assert allocator.reserved_bytes >= allocator.active_bytes
        assert live == [] or live[-1].size >= rounded(size)
        placed = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(placed))
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.active_bytes, allocator.reserved_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 30 * 2**20), st.booleans()), max_size=80))
def test_a_block_is_the_smallest_that_fits_then_the_lowest(requests: list[tuple[int, bool]]) -> None:
    """Against a search through all cached blocks, whatever their tree looks like."""
    allocator, used = CachingAllocator(), list[Block]()
    for num_bytes, is_free in requests:
        if is_free and used:
            allocator.free(used.pop(num_bytes % len(used)))
            continue
        blocks, size = allocator._blocks, rounded(num_bytes)
        fitting = [
            (int(blocks.size[number]), int(blocks.address[number]))
            for number in np.flatnonzero(blocks.is_cached)
            if blocks.pool[number] == (size <= SMALL) and blocks.size[number] >= size
        ]
        next_address = int(blocks.totals[NEXT_ADDRESS])
        used.append(allocator.allocate(num_bytes))
        assert used[-1].address == min(fitting, default=(0, next_address))[1]
