"""How many layers each stage gets when embedding and head weigh too."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from stagewright.errors import InputError


def balanced_layers(
    num_layers: int, layer_s: Sequence[float], first_s: float, last_s: float, most: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers of every stage so that the longest stage is as short as it can be: at least one each, but where there are more
    than two stages the first and the last may have none beside embedding and head.

    Args:
        layer_s: seconds of one layer on each stage's device.
        first_s, last_s: what embedding and head add.
        most: layers that each stage has room for; as many as there are by default.

    Among equally good splits earlier stages get fewer layers, because they keep more microbatches.

    Raises:
        InputError: too few layers for so many stages, or more than all have room for.

    >>> balanced_layers(10, [1.0] * 4, 0.1, 1.5)
    (3, 3, 3, 1)
    >>> balanced_layers(9, [1.0] * 4, 0.0, 0.0)
    (2, 2, 2, 3)
    >>> balanced_layers(12, [1.0, 1.0, 2.0], 0.0, 0.0), balanced_layers(12, [1.0, 1.0, 2.0], 0.0, 0.0, [3, 12, 12])
    ((5, 5, 2), (3, 6, 3))
    >>> balanced_layers(6, [1.0] * 8, 0.1, 1.5)
    (0, 1, 1, 1, 1, 1, 1, 0)
    """
    num_stages = len(layer_s)
    if num_layers < fewest_layers(num_stages):
        raise InputError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer")
    most = most or [num_layers] * num_stages
    if sum(most) < num_layers or min(most) < 1:
        raise InputError(
            f"{num_layers} layers do not fit on stages with room for {list(most)}: choose more stages"
        )
    ends = [0.0] * num_stages
    ends[0] += first_s
    ends[-1] += last_s
    counts = [1] * num_stages
    if num_stages > 2:
        counts[0] = counts[-1] = 0
    heap = [
        (ends[stage] + (counts[stage] + 1) * layer_s[stage], -stage)
        for stage in range(num_stages)
        if counts[stage] < most[stage]
    ]
    heapq.heapify(heap)
    for _ in range(num_layers - sum(counts)):
        _, negative = heapq.heappop(heap)
        stage = -negative
        counts[stage] += 1
        if counts[stage] < most[stage]:
            heapq.heappush(heap, (ends[stage] + (counts[stage] + 1) * layer_s[stage], negative))
    return tuple(counts)


def fewest_layers(num_stages: int) -> int:
    """What a model must have for so many stages.

    >>> [fewest_layers(num) for num in (1, 2, 3, 16)]
    [1, 2, 1, 14]
    """
    return num_stages if num_stages <= 2 else num_stages - 2
