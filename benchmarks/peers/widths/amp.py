"""AMP's cost of a configuration (NeurIPS'22)."""

from __future__ import annotations

import numpy as np

from peers.widths.profiled import (
    NodeRates,
    ProfiledLayers,
    Widths,
    rate_between,
)

_ELEMENT_BYTES = 4


def amp_seconds(
    layers: ProfiledLayers, widths: Widths, nodes: tuple[NodeRates, ...], global_batch: int
) -> float:
    """Seconds of a step as AMP predicts them: a fill and drain of the pipeline, then the slowest all-reduce.

    Source: Li et al. 2022, "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness" (NeurIPS),
    as in the cost functions of github.com/DachengLi1/AMP: fp32 messages, each cut counted once, a ring judged by its
    closing edge alone. Ignores: memory; that small microbatches are slower than profiles; overlap; the optimizer.
    """
    stages = layers.stage_seconds(widths)
    num_microbatches = global_batch / (widths.dp * widths.microbatch_size)
    pipeline = (num_microbatches - 1) * stages.max() + stages.sum()
    return float(pipeline + _cuts(layers, widths, nodes) + _all_reduce(layers, widths, nodes))


def _cuts(layers: ProfiledLayers, widths: Widths, nodes: tuple[NodeRates, ...]) -> float:
    total = 0.0
    for stage, boundary in enumerate(widths.boundaries[1:-1]):
        volume = layers.elements[boundary - 1] * widths.microbatch_size * _ELEMENT_BYTES
        total += volume * float(
            np.mean([1 / _slowest(widths, nodes, stage, replica) for replica in range(widths.dp)])
        )
    return total


def _slowest(widths: Widths, nodes: tuple[NodeRates, ...], stage: int, replica: int) -> float:
    pairs = (
        (widths.rank(stage, replica, shard), widths.rank(stage + 1, replica, shard))
        for shard in range(widths.tp)
    )
    return min(rate_between(nodes, a, b) for a, b in pairs)


def _all_reduce(layers: ProfiledLayers, widths: Widths, nodes: tuple[NodeRates, ...]) -> float:
    parameters = layers.stage_parameters(widths)
    share = 2 * (widths.dp - 1) / widths.dp
    found = [0.0]
    for stage in range(widths.pp):
        for shard in range(widths.tp):
            last, first = widths.rank(stage, widths.dp - 1, shard), widths.rank(stage, 0, shard)
            rate = rate_between(nodes, last, first)
            found.append(share * parameters[stage] * _ELEMENT_BYTES / rate)
    return max(found)
