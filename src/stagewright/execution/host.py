"""Saved values that spend the time between forward and backward off the device."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

Tensors = dict[int, torch.Tensor]


@dataclass(frozen=True)
class _View:
    """Where a value lies in one of the storages that were moved."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class HostStore:
    """Moves groups of tensors off `device` and back, storage by storage, so that views stay views.

    From a GPU they go to pinned memory of the host on a stream of their own, and come back on it: computation goes on
    meanwhile. On a CPU they go to a temporary file, which takes no memory of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._away: dict[Any, tuple[dict[int, _View], list[Any]]] = {}
        self._arriving: dict[Any, Any] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, key: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """Take copies of `tensors`; the caller lets go of them."""
        numbers: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        views: dict[int, _View] = {}
        for value, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in numbers:
                numbers[storage.data_ptr()] = len(storages)
                storages.append(storage)
            views[value] = _View(
                numbers[storage.data_ptr()],
                tensor.dtype,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
            )
        self._away[key] = views, [self._out(_bytes(storage)) for storage in storages]

    def get(self, key: Any) -> Tensors:
        """The tensors of `key`, in new storages; on a GPU their contents are there after `settle`."""
        views, kept = self._away.pop(key)
        storages = [self._back(one) for one in kept]
        if self._stream is not None:
            self._arriving[key] = self._stream.record_event()
        return {value: view.on(storages[view.storage]) for value, view in views.items()}

    def settle(self, key: Any) -> None:
        """What runs from now on waits for the tensors of `key`."""
        event = self._arriving.pop(key, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _out(self, flat: torch.Tensor) -> Any:
        if self._stream is None:
            file = tempfile.TemporaryFile(prefix="stagewright-offload-")  # noqa: SIM115 closed when it is read back
            flat.numpy().tofile(file)
            return file, flat.numel()
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)
        return host

    def _back(self, kept: Any) -> torch.UntypedStorage:
        if self._stream is None:
            return _read(*kept)
        with torch.cuda.stream(self._stream):
            flat = kept.to(self.device, non_blocking=True)
        flat.record_stream(torch.cuda.current_stream(self.device))
        return flat.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _read(file: IO[bytes], num_bytes: int) -> torch.UntypedStorage:
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    with file:
        file.seek(0)
        file.readinto(flat.numpy())  # type: ignore[attr-defined]
    return flat.untyped_storage()
