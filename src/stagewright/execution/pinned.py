"""Pinned host memory: an arena of blocks that are allocated once and cut into pieces.

The driver takes milliseconds to pin memory, and waits for the whole device; torch's allocator rounds each piece up to a
power of two. So a rank pins the amount that its plan predicts before it trains, and cuts pieces from that.
"""

from __future__ import annotations

import math
import warnings
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagewright.errors import StagewrightWarning
from stagewright.units import format_bytes

_ALIGNMENT_BYTES = 512
_PIECES_OF_BLOCK = 8
"""Number of the largest lasting pieces that a block has room for."""
_MARGIN = 1 / 8
"""Fraction of the reserved bytes added for gaps that first fit leaves between pieces of different sizes."""


@dataclass(eq=False)
class Piece:
    """A range of a block's bytes, reserved until it is released.

    `events` are those of copies from and to the bytes: of this piece's own copies, and, before its first use, of those of
    earlier pieces, which the new use has to wait for.
    """

    block: int
    start: int
    stop: int
    contents: torch.Tensor
    events: list[Any]

    def after(self, stream: Any) -> None:
        """Make work issued on `stream` from now on wait for all uses of these bytes by earlier pieces."""
        for event in self.events:
            stream.wait_event(event)
        self.events = []


@dataclass(order=True)
class _Gap:
    """A range of bytes that is free as soon as `events` have happened."""

    block: int
    start: int
    stop: int
    events: list[Any] = field(compare=False)


class PinnedArena:
    """All pinned memory of a process.

    Args:
        allocate: returns host memory of a shape and dtype.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._blocks: list[torch.Tensor] = []
        self._gaps: list[_Gap] = []
        self._released: deque[Piece] = deque()
        """Released pieces that are not gaps yet: the garbage collector may release a piece in the middle of a cut."""
        self._is_reported = False

    @property
    def num_bytes(self) -> int:
        """Total bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def reserve(self, num_bytes: int) -> None:
        """Pin `num_bytes` and a margin, unless there is a gap of that size."""
        self._collect()
        wanted = _aligned(int(num_bytes * (1 + _MARGIN)))
        if num_bytes and all(gap.stop - gap.start < wanted for gap in self._gaps):
            self._grow(wanted)

    def reserve_lasting(self, sizes: Iterable[int]) -> None:
        """Pin memory for lasting pieces that are cut in this order.

        Blocks have a power of two bytes, to which torch's allocator rounds, and room for a few of the largest pieces: one
        block for tens of GiB could take twice as much.
        """
        self._collect()
        aligned = [max(_ALIGNMENT_BYTES, _aligned(size)) for size in sizes]
        most = _power_of_two(min(sum(aligned), _PIECES_OF_BLOCK * max(aligned, default=0)))
        used = 0
        for size in aligned:
            if used + size > most:
                self._grow(_power_of_two(used))
                used = 0
            used += size
        if used:
            self._grow(_power_of_two(used))

    def cut(self, num_bytes: int) -> Piece:
        """Return a piece of the first gap that is large enough, or of a new block if there is none, with a warning the first
        time."""
        self._collect()
        size = max(_ALIGNMENT_BYTES, _aligned(num_bytes))
        gap = self._gap(size)
        if gap is None:
            if self._blocks and not self._is_reported:
                self._is_reported = True
                warnings.warn(
                    f"{format_bytes(self.num_bytes)} of pinned memory were predicted to be enough, but {format_bytes(size)} "
                    "more are needed: the device is idle while the driver pins them; later steps reuse them",
                    StagewrightWarning,
                    stacklevel=2,
                )
            self._grow(max(size, self.num_bytes // 8))
            gap = self._gap(size)
            assert gap is not None
        block, start, events = gap.block, gap.start, list(gap.events)
        if gap.stop - start == size:
            self._gaps.remove(gap)
        else:
            gap.start = start + size
        contents = self._blocks[block][start : start + num_bytes]
        return Piece(block, start, start + size, contents, events)

    def lasting(self, shape: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return a tensor for the host to read and write, whose bytes are reused when `owner` is gone."""
        piece = self.cut(math.prod(shape) * dtype.itemsize)
        for event in piece.events:
            event.synchronize()
        piece.events = []
        weakref.finalize(owner, self.release, piece)
        return piece.contents.view(dtype).view(shape)

    def release(self, piece: Piece) -> None:
        """Let later pieces use these bytes after the events of this one."""
        self._released.append(piece)

    def _gap(self, size: int) -> _Gap | None:
        return next((gap for gap in self._gaps if gap.stop - gap.start >= size), None)

    def _grow(self, num_bytes: int) -> None:
        self._blocks.append(self._allocate((num_bytes,), torch.uint8))
        insort(self._gaps, _Gap(len(self._blocks) - 1, 0, num_bytes, []))

    def _collect(self) -> None:
        """Turn released pieces into gaps, and merge adjacent gaps."""
        while self._released:
            piece = self._released.popleft()
            insort(self._gaps, _Gap(piece.block, piece.start, piece.stop, piece.events))
        joined: list[_Gap] = []
        for gap in self._gaps:
            gap.events = [event for event in gap.events if not event.query()]
            if joined and (joined[-1].block, joined[-1].stop) == (gap.block, gap.start):
                joined[-1].stop = gap.stop
                joined[-1].events += gap.events
            else:
                joined.append(gap)
        self._gaps = joined


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that pieces of these sizes take together."""
    return sum(max(_ALIGNMENT_BYTES, _aligned(size)) for size in sizes)


def _power_of_two(num_bytes: int) -> int:
    """Round up to a power of two.

    >>> [_power_of_two(size) for size in (1, 512, 513)]
    [1, 512, 1024]
    """
    return 1 << max(num_bytes - 1, 0).bit_length()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
