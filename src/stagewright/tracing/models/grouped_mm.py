"""Lets grouped matrix products of float32 and float16 be traced.

The kernels take these types (CPU and CUDA, torch 2.11 to 2.13); only the shape function that fake tensors use
refuses everything but bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, _meta_registrations

_TYPES = (torch.float32, torch.float16)


@functools.cache
def allow_tracing() -> None:
    """Widens the shape function of `aten::_grouped_mm`, once per process.

    Registering another function would not do: with the Python dispatcher on, as under `torch.export`, torch
    takes its own from a table of its own.
    """
    strict = _meta_registrations._meta_grouped_mm_common

    @functools.wraps(strict)
    def wide(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if mat_a.dtype not in _TYPES or mat_b.dtype != mat_a.dtype:
            return strict(mat_a, mat_b, *args, **kwargs)
        kwargs["out_dtype"] = None
        shape = strict(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), *args, **kwargs).shape
        return torch.empty(shape, dtype=mat_a.dtype, device=mat_a.device)

    _meta_registrations._meta_grouped_mm_common = wide
