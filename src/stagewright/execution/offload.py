"""Saved values that spend the time between forward and backward off the device."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.pinned import Piece
from stagewright.graph.added_nodes import FETCH, FETCHED, OFFLOAD, OFFLOADED


@dataclass(frozen=True)
class _View:
    """Where a value lies in what was moved; `offset` counts elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class HostCopy:
    """A storage on the host: pinned memory or, on a CPU, a temporary file, which takes no memory of the process. One that
    was on the host before stays where it is.
    """

    views: tuple[_View, ...]
    num_bytes: int
    contents: torch.Tensor | IO[bytes]
    left: Any = None
    """An event of the device, recorded when the copy to the host is made."""
    piece: Piece | None = field(default=None, repr=False)
    """Of pinned memory, where `contents` are."""
    arrived: Any = field(default=None, repr=False)
    """And when the latest copy back is."""


class HostCopies:
    """Moves storages off `device` and back, so that views stay views; what the operators of stage functions do that move.

    On a GPU each direction has a stream of its own, the same for all of a process. A copy begins when the device has
    computed what was issued before it, and the device waits for it where `left` or `arrived` says so. All memory is
    allocated, and freed after that wait, on the stream of the computations, so that the allocator may give it out again at
    once: nothing is held longer than the functions hold it, however far ahead of the device the host is.

    What is on the host is cut from the accelerator's arena of pinned memory, and used again after its last copy.

    Source: "CUDA semantics" of the PyTorch documentation on streams, events and pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._accelerator = accelerator_of(device)

    @property
    def moves(self) -> Mapping[str, Callable[..., Any]]:
        return {OFFLOAD: self.offload, OFFLOADED: self.left, FETCH: self.fetch, FETCHED: self.arrived}

    def offload(self, *tensors: torch.Tensor, offset: int, num_bytes: int) -> HostCopy:
        """Start to copy the storage of `tensors`: `num_bytes` from `offset` bytes in front of the first on."""
        start = int(tensors[0].storage_offset()) * tensors[0].element_size() - offset
        views = tuple(
            _View(t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()) - start // t.element_size())
            for t in tensors
        )
        flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        flat.set_(tensors[0].untyped_storage(), start, (num_bytes,), (1,))
        if flat.device.type != self.device.type:  # a fused kernel's random state may be on the host already
            return HostCopy(views, num_bytes, flat)
        if not self._accelerator.is_asynchronous:
            return self._written(views, flat)
        arena = self._accelerator.arena
        piece = arena.cut(num_bytes)
        stream, _ = self._accelerator.copy_streams
        stream.wait_stream(self._accelerator.current_stream())
        piece.after(stream)
        with stream:
            piece.contents.copy_(flat, non_blocking=True)
        left = stream.record_event()
        copy = HostCopy(views, num_bytes, piece.contents, left, piece)
        piece.events.append(left)
        weakref.finalize(copy, arena.release, piece)
        return copy

    def left(self, copy: HostCopy, *tensors: torch.Tensor) -> None:
        """What runs from now on may overwrite `tensors`."""
        if copy.left is not None:
            self._accelerator.current_stream().wait_event(copy.left)

    def fetch(self, copy: HostCopy) -> torch.Tensor:
        """Start to copy back into a new storage, whose contents are there after `arrived`."""
        if copy.left is None and isinstance(copy.contents, torch.Tensor):  # it never was on the device
            return copy.contents
        flat = torch.empty(copy.num_bytes, dtype=torch.uint8, device=self.device)
        if not isinstance(copy.contents, torch.Tensor):
            copy.contents.seek(0)
            copy.contents.readinto(flat.numpy())  # type: ignore[attr-defined]
            return flat
        _, stream = self._accelerator.copy_streams
        stream.wait_stream(self._accelerator.current_stream())
        with stream:
            flat.copy_(copy.contents, non_blocking=True)
        copy.arrived = stream.record_event()
        if copy.piece is not None:
            copy.piece.events.append(copy.arrived)
        return flat

    def arrived(self, copy: HostCopy, flat: torch.Tensor, *, places: Sequence[int]) -> list[torch.Tensor]:
        """The tensors that were at `places` when they left, in the storage of `flat`; what runs from now on waits for its
        contents."""
        if copy.arrived is not None:
            self._accelerator.current_stream().wait_event(copy.arrived)
        return [copy.views[place].on(flat.untyped_storage()) for place in places]

    def _written(self, views: tuple[_View, ...], flat: torch.Tensor) -> HostCopy:
        file = tempfile.TemporaryFile(prefix="stagewright-offload-")  # noqa: SIM115 open as long as the copy is there
        flat.numpy().tofile(file)
        made = HostCopy(views, flat.numel(), file)
        weakref.finalize(made, file.close)
        return made
