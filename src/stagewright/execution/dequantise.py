"""Quantised weights as the numbers they stand for, one tensor at a time.

Source: ``Fp8Dequantize`` and ``convert_moe_packed_tensors`` of transformers, which read whole models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagewright.errors import InputError

_EXPONENT_BIAS = 127  # of scales that are powers of two, stored as bytes
_EXACT = (torch.bfloat16, torch.float32)  # have every number that four bits and a power of two make


def dequantised(
    key: str, parts: Sequence[torch.Tensor], said: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Tensor `key` of the stored `parts` (`stagewright.execution.quantised.parts_of`); `said` is the config's scheme.

    The result need not be of type `dtype`, which is what it is wanted as.

    Raises:
        InputError: weights and scales do not fit each other.
    """
    if len(parts) == 1:
        return parts[0]
    one, scales = parts
    if one.dtype == torch.uint8:
        return _of_packed(key, one, scales, dtype if dtype in _EXACT else torch.float32)
    if one.dtype != torch.float8_e4m3fn:
        raise InputError(
            f"tensor '{key}' is stored as {one.dtype} with scales, and of such only torch.float8_e4m3fn is read: dequantise "
            "it once with transformers, or run with --random-weights to start from the seed"
        )
    return _of_blocks(key, one, scales, said.get("weight_block_size"))


def _of_blocks(
    key: str, weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None
) -> torch.Tensor:
    """Every block of ``[rows, columns]`` of a weight times its scale; the last ones may be cut off."""
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - _EXPONENT_BIAS)
    scales, wide = scales.float(), weight.float()
    if scales.numel() == 1:
        return wide * scales.reshape(())
    sizes = tuple(block or ())
    if len(sizes) == 2 and weight.dim() == scales.dim() >= 2:
        rows, columns = weight.shape[-2:]
        if scales.shape == (*weight.shape[:-2], -(-rows // sizes[0]), -(-columns // sizes[1])):
            scales = scales.repeat_interleave(sizes[0], -2)[..., :rows, :]
            return wide * scales.repeat_interleave(sizes[1], -1)[..., :columns]
    raise InputError(
        f"tensor '{key}' is {list(weight.shape)} and its scales are {list(scales.shape)}, which does not fit blocks of "
        f"{list(sizes) or 'no size'} (weight_block_size in config.json): the files belong to another model"
    )


def _of_packed(key: str, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two numbers of four bits per byte, 32 of them with one scale, which transformers also transposes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape or scales.dtype != torch.uint8:
        raise InputError(
            f"tensor '{key}' has blocks of {list(blocks.shape)} and scales of {list(scales.shape)}, which do not fit each "
            "other: the files belong to another model"
        )
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)
