"""Shape function of grouped matmuls on fake tensors, corrected to agree with the kernels.

The kernels (torch 2.11 to 2.13) also support float32 and float16, and pad each row of their output to 16 bytes. The shape
function of fake tensors rejects everything but bfloat16 and, in builds without CUDA, pads nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, _meta_registrations

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROW_BYTES = 16


@functools.cache
def allow_tracing() -> None:
    """Correct the shape function of `aten::_grouped_mm`, once per process.

    Registering another function is not enough: with the Python dispatcher on, as under `torch.export`, torch takes its own
    from a separate table.
    """
    strict = _meta_registrations._meta_grouped_mm_common

    @functools.wraps(strict)
    def as_run(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if mat_a.dtype not in _TYPES or mat_b.dtype != mat_a.dtype or kwargs.get("out_dtype") is not None:
            return strict(mat_a, mat_b, *args, **kwargs)
        shape = strict(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), *args, **kwargs).shape
        return _padded(tuple(shape), mat_a)

    _meta_registrations._meta_grouped_mm_common = as_run


def _padded(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an empty tensor of (..., rows, columns) whose rows are a multiple of 16 bytes apart."""
    multiple = _ROW_BYTES // like.element_size()
    row = -(-shape[-1] // multiple) * multiple
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
