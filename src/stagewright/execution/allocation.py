"""Allocators: how that of each device says that memory is short, and what the C library's keeps of freed tensors."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from stagewright.errors import causes

_OF_THE_CPU = "can't allocate memory"  # PyTorch's allocator on the CPU has no exception of its own


def cause_of(error: BaseException | None) -> BaseException | None:
    """The allocation that failed, if that is what is behind `error`."""
    for each in causes(error):
        if isinstance(each, torch.OutOfMemoryError | MemoryError):
            return each
        if isinstance(each, RuntimeError) and _OF_THE_CPU in str(each):
            return each
    return None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``. Source: malloc.h of the GNU C library."""

_MOST = 2**31 - 1
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep the host memory of freed tensors for the next ones; returns whether it does.

    The GNU C library gives tensors above 32 MiB back to the system when they are freed and most of the others soon
    after, so that every microbatch meets the page faults of its large tensors anew: a tenth of a backward with a large
    vocabulary. Kept memory is what PyTorch's allocator for GPUs calls reserved; its peak is that of the first step.
    Tensors of 2 GiB and more are given back still. Whoever set one of the library's own variables is left alone.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
