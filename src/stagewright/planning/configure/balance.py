"""How many layers each stage gets when embedding and head weigh too."""

from __future__ import annotations

import heapq

from stagewright.errors import InputError


def balanced_layers(
    num_layers: int, num_stages: int, layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Layers of every stage, at least one each, so that the longest stage is as short as it can be.

    `first_s` and `last_s` are what embedding and head add. Among equally good splits earlier stages get fewer
    layers, because they keep more microbatches.

    Raises:
        InputError: fewer layers than stages.

    >>> balanced_layers(10, 4, 1.0, 0.1, 1.5)
    (3, 3, 3, 1)
    >>> balanced_layers(9, 4, 1.0, 0.0, 0.0)
    (2, 2, 2, 3)
    """
    if num_layers < num_stages:
        raise InputError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer")
    ends = [0.0] * num_stages
    ends[0] += first_s
    ends[-1] += last_s
    counts = [1] * num_stages
    heap = [(ends[stage] + 2 * layer_s, -stage) for stage in range(num_stages)]
    heapq.heapify(heap)
    for _ in range(num_layers - num_stages):
        _, negative = heapq.heappop(heap)
        counts[-negative] += 1
        heapq.heappush(heap, (ends[-negative] + (counts[-negative] + 1) * layer_s, negative))
    return tuple(counts)
