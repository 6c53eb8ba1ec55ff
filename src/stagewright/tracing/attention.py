"""Attention as the device or runtime that is predicted computes it, in place of the kernels of the device that traces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from stagewright.errors import InputError
from stagewright.tracing.context_parallel import over_all_parts


@contextlib.contextmanager
def attention_of(kind: str, cp: int) -> Iterator[None]:
    """Within it `scaled_dot_product_attention` is what the target computes.

    * ``traced``: what the model calls.
    * ``fused``: one kernel, with dropout in it, and also where values are of another width than the keys (MLA), as GPUs have
      it; a CPU would compute scores in float32 one operator after the other.
    * ``explicit``: scores, scale with mask and softmax, dropout and weighted values, each an operator in the type of its
      operands.
    * In `cp` parts of the sequence, as `stagewright.tracing.context_parallel` says.

    But for the first these are costed, never run.
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

    def in_one_kernel(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if cp > 1 and (attn_mask is not None or query.shape[-2] != key.shape[-2]):
            raise InputError(
                "context parallelism needs attention that is causal or sees all tokens, and this model's has a mask of its "
                "own: leave out --cp"
            )
        if cp > 1:
            return over_all_parts(cp, query, key, value, is_causal, scale)
        if attn_mask is None and query.shape[-1] != value.shape[-1] and query.shape[-2] == key.shape[-2]:
            # A CPU has no kernel for it; values are no view of what the keys are made of too.
            own = value.transpose(1, 2).contiguous().transpose(1, 2)
            return over_all_parts(1, query, key, own, is_causal, scale)
        return fused(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    if kind == "explicit" and cp > 1:
        raise InputError(
            "context parallelism needs fused attention, and this runtime stores scores: leave out --cp"
        )
    stand_in = {"traced": fused, "fused": in_one_kernel, "explicit": explicit}[kind if cp == 1 else "fused"]
    functional.scaled_dot_product_attention = stand_in  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = fused
