"""Seconds of fused attention by its shape: rows of blocks of scores, dealt out to the multiprocessors."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from stagewright.cluster.strict import StrictModel

_BLOCK_KEYS = 128
"""Keys and values that a multiprocessor takes at once. Source: the kernels of FlashAttention-2 and -3 and of cuDNN."""

FORWARD_FLOP, BACKWARD_FLOP = 4 * 128, 10 * 128
"""FLOP of one score with heads of 128, by which kernels' efficiencies are told: two products forward, five backward."""


class Scores(NamedTuple):
    """Scores of `batch` heads of samples, each of `queries` that see up to `keys`."""

    batch: float
    queries: float
    keys: float
    """Which the query sees that sees the most."""
    flop: float
    """Of one score: forward 2 for each element of a key and of a value, backward 6 and 4."""
    seen: float
    """Keys that a query sees on average: `keys` where nothing is masked."""
    edges: int = 0
    """Of the mask along the keys: none, 1 where it is causal, 2 where a window slides over them."""


class Attention(StrictModel):
    """What decides how long a device takes for fused attention of different shapes, beside its peak and the efficiency of
    the kernel, which is that of endless sequences with heads of 128."""

    exponential_rate: Annotated[float, Field(gt=0, le=1e18)]
    """Exponentials per second, of all multiprocessors, as far as they are not beside products."""
    row_start_s: Annotated[float, Field(ge=0, le=1)]
    """Of a row of blocks, before and after they keep the multiprocessor busy: queries come, a first block fills the
    pipeline, results go. Once more in front of the first rows."""
    row_queries: Literal[64, 128, 256] = 128
    """Queries of a row: what a kernel holds for one multiprocessor, a fact of its source code."""
    shares_narrow: bool = True
    """Whether rows of heads narrower than 128 share a multiprocessor forward, so that some compute while others start:
    those of FlashAttention-2 do; kernels for Hopper and Blackwell have it for themselves."""


def attention_seconds(
    attention: Attention, scores: Scores, flops: float, num_multiprocessors: int, flop_of_128: float
) -> float:
    """Time of fused attention without its launch and its memory traffic.

    Args:
        flops: FLOP per second of endless sequences with heads of 128, scores that are masked not counted.
        flop_of_128: of one score with heads of 128: `FORWARD_FLOP` or `BACKWARD_FLOP`.

    A row is the queries of one tile with all blocks of keys that they see, each of which costs its products and its
    exponentials. Equal rows come in waves. Under a mask they differ: the next row goes to the multiprocessor that is
    free first, and the last to end has on average a row more than its part.

    Source: FlashAttention-2 (arXiv 2307.08691) for rows and blocks, FlashAttention-3 (arXiv 2407.08608) for exponentials,
    list scheduling (Graham 1969) for the last row. Ignores: how many keys a kernel really takes at once with narrow and wide
    heads; several rows at once on a multiprocessor; keys and values that heads share; parts of a row (split keys).
    """
    exponential_s = min(1 / attention.exponential_rate, flop_of_128 / flops)
    product_s = scores.flop * (1 / flops - exponential_s / flop_of_128)
    start_s, height = attention.row_start_s, attention.row_queries
    if attention.shares_narrow and flop_of_128 == FORWARD_FLOP:
        start_s *= min(scores.flop / flop_of_128, 1.0)
    block_s = num_multiprocessors * height * _BLOCK_KEYS * (product_s + exponential_s)
    waves = scores.batch * math.ceil(scores.queries / height) / num_multiprocessors
    blocks = math.ceil((scores.keys + (height if scores.edges > 1 else 0)) / _BLOCK_KEYS)
    longest_s = start_s + blocks * block_s
    seconds = math.ceil(waves) * longest_s
    if scores.edges:
        mean_blocks = min(blocks, (scores.seen + scores.edges * height / 2) / _BLOCK_KEYS)
        masked_s = (waves + 1) * (start_s + mean_blocks * block_s)
        seconds = min(seconds, max(longest_s, masked_s))
    return start_s + seconds
