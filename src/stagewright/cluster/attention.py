"""Time of fused attention by shape: rows of blocks of scores, distributed over the multiprocessors."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from stagewright.cluster.schema import StrictModel

_BLOCK_KEYS = 128
"""Keys and values that a multiprocessor processes at once. Source: the kernels of FlashAttention-2 and -3 and of cuDNN."""

FORWARD_FLOP, BACKWARD_FLOP = 4 * 128, 10 * 128
"""FLOP of one score with heads of 128, for which efficiencies are stated: two matmuls forward, five backward."""


class Scores(NamedTuple):
    """Attention scores of `batch` heads of samples, each with `queries` that see up to `keys`."""

    batch: float
    queries: float
    keys: float
    """Maximum number of keys that a query sees."""
    flop: float
    """FLOP of one score: forward 2 for each element of a key and of a value, backward 6 and 4."""
    seen: float
    """Keys that a query sees on average: `keys` without a mask."""
    edges: int = 0
    """Edges of the mask along the keys: 0 without a mask, 1 if causal, 2 for a sliding window."""


class Attention(StrictModel):
    """Parameters of a device for the time of fused attention by shape, besides its peak and the efficiency of the kernel
    (for infinite sequences with heads of 128)."""

    exponential_rate: Annotated[float, Field(gt=0, le=1e18)]
    """Exponentials per second, of all multiprocessors, where matmuls do not hide them."""
    row_start_s: Annotated[float, Field(ge=0, le=1)]
    """Seconds of a row of blocks in which the multiprocessor is not busy: queries are loaded, a first block fills the
    pipeline, results are stored. They count once more before the first rows."""
    row_queries: Literal[64, 128, 256] = 128
    """Queries of a row: those that a kernel holds on one multiprocessor, from its source code."""
    shares_narrow: bool = True
    """Whether rows of heads narrower than 128 share a multiprocessor in the forward, so that some compute while others
    start: true for FlashAttention-2, false for kernels for Hopper and Blackwell."""


def attention_seconds(
    attention: Attention, scores: Scores, flops: float, num_multiprocessors: int, flop_of_128: float
) -> float:
    """Return the seconds of fused attention without its launch and its memory traffic.

    Args:
        flops: FLOP per second for infinite sequences with heads of 128, without masked scores.
        flop_of_128: FLOP of one score with heads of 128: `FORWARD_FLOP` or `BACKWARD_FLOP`.

    A row is the queries of one tile with all blocks of keys that they see; each block costs its matmuls and exponentials.
    Equal rows run in waves. With a mask they differ: the next row goes to the first free multiprocessor, and the last one to
    end has on average one row more than its share.

    Source: FlashAttention-2 (arXiv 2307.08691) for rows and blocks, FlashAttention-3 (arXiv 2407.08608) for exponentials,
    list scheduling (Graham 1969) for the last row. Ignores: the real number of keys per block with narrow and wide heads;
    several rows at once on a multiprocessor; keys and values that heads share; parts of a row (split keys).
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
