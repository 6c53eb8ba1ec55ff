"""Offload of saved values from the device between forward and backward."""

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
    """A value's layout in the moved storage; `offset` counts elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class HostCopy:
    """A storage on the host: pinned memory or, on a CPU, a temporary file, which takes no memory of the process. A storage
    that is already on the host stays where it is.
    """

    views: tuple[_View, ...]
    num_bytes: int
    contents: torch.Tensor | IO[bytes]
    copied: Any = None
    """Device event that is recorded after the copy to the host."""
    piece: Piece | None = field(default=None, repr=False)
    """Piece of pinned memory that holds `contents`."""
    copied_back: Any = field(default=None, repr=False)
    """Device event that is recorded after the latest copy back."""


class HostCopies:
    """The implementation of offload operators: it copies storages off `device` and back, so that views stay views.

    On a GPU each direction has a separate stream, the same for all of a process. A copy begins when the device has computed
    everything issued before it, and the device waits for it at `offloaded` or `fetched`. All memory is allocated, and freed
    after that wait, on the stream of the computations, so that the allocator may reuse it at once: nothing is held longer
    than the functions hold it, however far ahead of the device the host is.

    Host memory is cut from the accelerator's arena of pinned memory, and reused after its last copy.

    Source: "CUDA semantics" of the PyTorch documentation on streams, events and pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._accelerator = accelerator_of(device)

    @property
    def operators(self) -> Mapping[str, Callable[..., Any]]:
        return {OFFLOAD: self.offload, OFFLOADED: self.offloaded, FETCH: self.fetch, FETCHED: self.fetched}

    def offload(self, *tensors: torch.Tensor, offset: int, num_bytes: int) -> HostCopy:
        """Start to copy the storage of `tensors`: `num_bytes` bytes, from `offset` bytes before the first tensor on."""
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
        event = stream.record_event()
        copy = HostCopy(views, num_bytes, piece.contents, event, piece)
        piece.events.append(event)
        weakref.finalize(copy, arena.release, piece)
        return copy

    def offloaded(self, copy: HostCopy, *tensors: torch.Tensor) -> None:
        """Make work issued from now on wait for the copy of `tensors`, so that it may overwrite them."""
        if copy.copied is not None:
            self._accelerator.current_stream().wait_event(copy.copied)

    def fetch(self, copy: HostCopy) -> torch.Tensor:
        """Start to copy back into a new storage, whose contents are valid after `fetched`."""
        if copy.copied is None and isinstance(copy.contents, torch.Tensor):  # it never was on the device
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
        copy.copied_back = stream.record_event()
        if copy.piece is not None:
            copy.piece.events.append(copy.copied_back)
        return flat

    def fetched(self, copy: HostCopy, flat: torch.Tensor, *, places: Sequence[int]) -> list[torch.Tensor]:
        """Return the offloaded tensors number `places` as views of the storage of `flat`; work issued from now on waits for
        its contents."""
        if copy.copied_back is not None:
            self._accelerator.current_stream().wait_event(copy.copied_back)
        return [copy.views[place].on(flat.untyped_storage()) for place in places]

    def _written(self, views: tuple[_View, ...], flat: torch.Tensor) -> HostCopy:
        file = tempfile.TemporaryFile(prefix="stagewright-offload-")  # noqa: SIM115 open as long as the copy exists
        flat.numpy().tofile(file)
        copy = HostCopy(views, flat.numel(), file)
        weakref.finalize(copy, file.close)
        return copy
