"""Attention as the device or runtime that is predicted computes it, in place of the kernels of the device that traces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@contextlib.contextmanager
def attention_of(kind: str, target: str, device: str) -> Iterator[None]:
    """Within it `scaled_dot_product_attention` is what the target computes.

    * ``explicit``: scores, scale with mask and softmax, dropout and weighted values, each an operator in the type of its
      operands. Such a graph is costed, never run.
    * else, for a GPU traced on a CPU, dropout is part of the fused kernel, as on GPUs, where a CPU would compute scores in
      float32 one operator after the other.
    """
    fused = functional.scaled_dot_product_attention

    def explicit(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        repeats = query.shape[-3] // key.shape[-3]
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=-3) for one in (key, value))
        scores = torch.matmul(query, key.transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
        if attn_mask is not None:
            is_mask = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -1e4) if is_mask else scores + attn_mask
        weights = torch.softmax(scores, dim=-1)
        return torch.matmul(functional.dropout(weights, dropout_p) if dropout_p else weights, value)

    def in_one_kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            args = (args[0], 0.0, *args[2:])
        return fused(query, key, value, *args, **{**kwargs, **({"dropout_p": 0.0} if len(args) < 2 else {})})

    stand_in = (
        explicit if kind == "explicit" else in_one_kernel if target == "cuda" and device == "cpu" else fused
    )
    functional.scaled_dot_product_attention = stand_in  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused
