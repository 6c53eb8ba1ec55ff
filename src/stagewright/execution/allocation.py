"""Allocators: recognition of out-of-memory errors, and settings of the C library's allocator."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from stagewright.errors import causes

_OF_THE_CPU = "can't allocate memory"  # PyTorch's allocator on the CPU has no exception of its own


def cause_of(error: BaseException | None) -> BaseException | None:
    """Return the failed allocation that caused `error`, or None."""
    for cause in causes(error):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return cause
        if isinstance(cause, RuntimeError) and _OF_THE_CPU in str(cause):
            return cause
    return None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``. Source: malloc.h of the GNU C library."""

_MOST = 2**31 - 1
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep the host memory of freed tensors for the next ones; returns whether it does.

    The GNU C library returns tensors above 32 MiB to the system when they are freed and most of the others soon after, so
    that every microbatch repeats the page faults of its large tensors: a tenth of a backward with a large vocabulary. Kept
    memory is what PyTorch's allocator for GPUs calls reserved; its peak is that of the first step. Tensors of 2 GiB and
    more are still returned. Nothing is changed where the user set one of the library's variables.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
