"""Pinned memory of the host: blocks that are allocated once and cut by hand.

The driver takes milliseconds to pin memory, and waits for the whole device; torch's allocator rounds each piece up to a
power of two. So a rank pins what its plan predicts before it trains, and pieces are cut from that.
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
_MARGIN = 1 / 8
"""Of what is reserved, for what first fit loses between pieces of different sizes."""


@dataclass(eq=False)
class Piece:
    """Bytes of a block, which are its own until it is released.

    `events` are those of copies from and to it: before it is released of its own, before it is used of earlier pieces of
    these bytes, which the new use has to come after.
    """

    block: int
    start: int
    stop: int
    contents: torch.Tensor
    events: list[Any]

    def after(self, stream: Any) -> None:
        """What `stream` is given from now on comes after all uses by earlier pieces of these bytes."""
        for event in self.events:
            stream.wait_event(event)
        self.events = []


@dataclass(order=True)
class _Gap:
    """Bytes that nothing uses, as soon as `events` have happened."""

    block: int
    start: int
    stop: int
    events: list[Any] = field(compare=False)


class PinnedArena:
    """All pinned memory of a process.

    Args:
        allocate: gives memory of the host of a shape and type.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._blocks: list[torch.Tensor] = []
        self._gaps: list[_Gap] = []
        self._released: deque[Piece] = deque()
        """Not among the gaps yet: a piece may be released in the middle of a cut, by the garbage collector."""
        self._is_reported = False

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def reserve(self, num_bytes: int) -> None:
        """Pin as much, and a margin, unless there is a gap of that size."""
        self._collect()
        wanted = _aligned(int(num_bytes * (1 + _MARGIN)))
        if num_bytes and all(gap.stop - gap.start < wanted for gap in self._gaps):
            self._grow(wanted)

    def cut(self, num_bytes: int) -> Piece:
        """Return bytes of the first gap that is large enough; of a new block if there is none, with a warning the first
        time."""
        self._collect()
        size = max(_ALIGNMENT_BYTES, _aligned(num_bytes))
        gap = self._gap(size)
        if gap is None:
            if self._blocks and not self._is_reported:
                self._is_reported = True
                warnings.warn(
                    f"{format_bytes(self.num_bytes)} of pinned memory were predicted to be enough, and {format_bytes(size)} "
                    "more are needed: the device stands still while the driver pins them; later steps use them again",
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
        """Return a tensor that the host writes to and reads, whose bytes are used again when `owner` is gone."""
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
        """Make gaps of what was released, and one of neighbours."""
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
    """Return what pieces of these sizes take together."""
    return sum(max(_ALIGNMENT_BYTES, _aligned(size)) for size in sizes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
