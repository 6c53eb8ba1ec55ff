"""The layer costs that AdaPtis publishes, as problems for the joint search.

Source: Guo et al. 2025, "AdaPtis" (arXiv 2509.23722), the plotting data and simulator configuration in
github.com/guojihu-hana/PipelineSimulator: seconds of each layer type relative to the forward of the reference
layer, by sequence length and vocabulary; layers, ranks, hidden sizes, heads and tensor-parallel width by model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.planning.joint.problem import JointProblem, LayerTable

Passes = tuple[float, float, float]
"""Forward, input gradient, weight gradient of one microbatch."""

FAMILIES = ("Gemma", "DeepSeek", "Nemotron-H")
SIZES = ("Small", "Medium", "Large")
SEQUENCES = (2048, 4096)

PROFILES: dict[tuple[str, int, int], tuple[Passes, ...]] = {
    ("Gemma", 2048, 0): ((1.0, 1.61, 0.2), (4.17, 0.65, 0.4)),
    ("Gemma", 2048, 1): ((1.0, 1.64, 0.2), (7.23, 1.6, 0.82)),
    ("Gemma", 2048, 2): ((1.0, 1.65, 0.2), (12.81, 3.64, 1.59)),
    ("Gemma", 4096, 0): ((1.0, 1.65, 0.22), (5.72, 1.21, 0.58)),
    ("Gemma", 4096, 1): ((1.0, 1.65, 0.22), (10.37, 2.85, 1.15)),
    ("Gemma", 4096, 2): ((1.0, 1.67, 0.22), (19.22, 5.93, 2.29)),
    ("DeepSeek", 2048, 0): ((1.0, 1.99, 0.0), (2.62, 3.87, 0.17), (5.11, 1.37, 0.62)),
    ("DeepSeek", 2048, 1): ((1.0, 2.1, 0.0), (2.69, 4.0, 0.18), (8.91, 3.0, 1.27)),
    ("DeepSeek", 2048, 2): ((1.0, 2.28, 0.0), (2.72, 4.04, 0.18), (16.31, 5.56, 2.54)),
    ("DeepSeek", 4096, 0): ((1.0, 2.05, 0.0), (2.28, 3.49, 0.16), (6.26, 1.98, 0.82)),
    ("DeepSeek", 4096, 1): ((1.0, 2.11, 0.0), (2.29, 3.52, 0.17), (11.2, 3.73, 1.59)),
    ("DeepSeek", 4096, 2): ((1.0, 2.24, 0.0), (2.31, 3.55, 0.17), (21.57, 7.82, 3.23)),
    ("Nemotron-H", 2048, 0): ((3.38, 5.18, 0.53), (1.0, 2.75, 0.02), (10.81, 0.9, 0.57)),
    ("Nemotron-H", 2048, 1): ((2.79, 4.45, 0.46), (1.0, 2.53, 0.02), (13.92, 2.22, 0.95)),
    ("Nemotron-H", 2048, 2): ((3.06, 4.99, 0.5), (1.0, 2.53, 0.02), (24.37, 5.4, 1.96)),
    ("Nemotron-H", 4096, 0): ((3.12, 4.96, 0.52), (1.0, 2.79, 0.02), (13.99, 2.13, 0.86)),
    ("Nemotron-H", 4096, 1): ((3.22, 5.07, 0.54), (1.0, 2.85, 0.02), (23.94, 5.24, 1.71)),
    ("Nemotron-H", 4096, 2): ((3.06, 4.96, 0.53), (1.0, 2.7, 0.02), (39.97, 10.33, 3.18)),
}
"""By family, sequence length and size: the layer types in the order of the source, the head last."""

_SPLIT_OFF = {"DeepSeek": 0.2, "Nemotron-H": 0.1}
"""What the source's simulator takes out of the input gradient where it has no weight gradient."""


@dataclass(frozen=True)
class Family:
    """Shapes of a model family: layers and ranks by size, vocabulary of the smallest."""

    layers: tuple[int, int, int]
    ranks: tuple[int, int, int]
    hidden: int
    vocabulary: int
    tensor_parallel: int


SHAPES = {
    "Gemma": Family((32, 64, 128), (4, 8, 16), 1536, 256_000, 4),
    "DeepSeek": Family((16, 32, 64), (4, 8, 8), 2048, 131_072, 2),
    "Nemotron-H": Family((28, 56, 112), (4, 8, 16), 1024, 131_072, 2),
}


def layer_passes(family: str, sequence: int, size: int) -> list[Passes]:
    """The costs of every layer and of the head.

    DeepSeek: the first layers, one fewer than a rank has of all, are dense. Nemotron-H: every third, sixth or
    twelfth layer (by size) is attention.
    """
    *types, head = PROFILES[family, sequence, size]
    shape = SHAPES[family]
    count = shape.layers[size]
    if family == "Gemma":
        return [types[0]] * count + [head]
    if family == "DeepSeek":
        dense = count // shape.ranks[size] - 1
        return [_split(family, types[0])] * dense + [types[1]] * (count - dense) + [head]
    every = 3 << size
    mamba = _split(family, types[1])
    return [types[0] if (layer + 1) % every == 0 else mamba for layer in range(count)] + [head]


def _split(family: str, passes: Passes) -> Passes:
    """DeepSeek's dense and Nemotron-H's Mamba layers give a part of the input gradient as weight gradient, if
    they have none."""
    forward, input_grad, weight_grad = passes
    if weight_grad:
        return passes
    return forward, input_grad - _SPLIT_OFF[family], _SPLIT_OFF[family]


def cell(
    family: str,
    sequence: int,
    size: int,
    num_microbatches: int | None = None,
    memory_bytes: float = np.inf,
    num_ranks: int | None = None,
) -> JointProblem:
    """One cell of the paper's table, by default with four microbatches per rank; time in forwards of the
    reference layer.

    A layer saves what the source's simulator counts for flash attention, ``0.18298 (34 s h + 5 s^2 a)`` bytes
    with a = 32 heads (16 for DeepSeek), of which the weight gradient frees 43.31 %; the head ``6 s h + 8 s V``.
    """
    shape = SHAPES[family]
    table = np.array(layer_passes(family, sequence, size)).T
    heads = 16 if family == "DeepSeek" else 32
    layer_bytes = 0.18298 * (34 * sequence * shape.hidden + 5 * sequence**2 * heads)
    head_bytes = 6 * sequence * shape.hidden + 8 * sequence * (shape.vocabulary << size)
    saved = np.full(table.shape[1], layer_bytes)
    saved[-1] = head_bytes
    saved /= shape.tensor_parallel
    held = saved * 0.4331
    held[-1] = saved[-1] / 3
    ranks = num_ranks or shape.ranks[size]
    return JointProblem.of(
        LayerTable.of(*table, saved_bytes=saved, held_bytes=held),
        ranks,
        num_microbatches or 4 * ranks,
        memory_bytes=memory_bytes,
    )


def cells() -> list[tuple[str, int, int]]:
    """Family, sequence length and size of all 18."""
    return [(family, seq, size) for family in FAMILIES for seq in SEQUENCES for size in range(3)]
