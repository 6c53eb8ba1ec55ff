"""Allocations that fail: every device has its own way to say so."""

from __future__ import annotations

import torch

_OF_THE_CPU = "can't allocate memory"  # PyTorch's allocator on the CPU has no exception of its own


def cause_of(error: BaseException | None) -> BaseException | None:
    """The allocation that failed, if that is what is behind `error`."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        if isinstance(error, RuntimeError) and _OF_THE_CPU in str(error):
            return error
        error = error.__cause__
    return None
