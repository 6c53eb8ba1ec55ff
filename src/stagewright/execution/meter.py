"""How many bytes of tensors are really alive, and how many were at the worst moment.

On CUDA the allocator knows. On the CPU a dispatch mode sees every tensor an operator makes and counts its storage until
the last reference is gone; it shares no code with the estimator it judges.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageMeter(TorchDispatchMode):
    """Counts live bytes of storages while active.

    Args:
        already: tensors that were alive before, such as parameters and optimizer state.
        elsewhere: tensors that do not count, because they stand for memory of the host.
    """

    def __init__(self, already: Iterable[torch.Tensor] = (), elsewhere: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        for tensor in elsewhere:
            self._known[tensor.untyped_storage()] = 0
        for tensor in already:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._count(item)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live_bytes -= size
