"""What the caching allocator of a Megatron run holds beyond the allocated peak."""

from __future__ import annotations

from stagewright.estimation.megatron.footprint import RankFootprint
from stagewright.estimation.megatron.layer import Layers
from stagewright.estimation.megatron.layout import Layout
from stagewright.estimation.megatron.shape import Shape
from stagewright.estimation.megatron.stack import MegatronStack

_LOGIT_COPIES = 3
"""Blocks as large as the logits that nothing else fits without a rest: logits, their gradient, half of the fp32 copy."""

_SMALL_BYTES = 2**29
"""Rests of all other blocks."""


def reserved_bytes(rank: RankFootprint, shape: Shape, layout: Layout, stack: MegatronStack) -> int:
    """The reserved peak of a rank.

    Source: fit of half of the runs of `validation/megatron_core.py`. Ignores: fragmentation that depends on the order of
    requests; expandable segments, which need less.
    """
    vocabulary = Layers(shape, layout, stack).padded_vocabulary()
    logits = stack.element_bytes * layout.num_tokens * vocabulary // layout.tp
    return rank.peak_bytes + _LOGIT_COPIES * logits + _SMALL_BYTES
