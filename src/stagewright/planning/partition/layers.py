"""Numbers of layers per stage, balanced with embedding and head on devices of different speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.errors import InputError


def balanced_layers(seconds: Sequence[Floats], most: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of layers per stage that make the longest stage as short as possible.

    Every stage has at least one layer; with more than two stages the first and the last may have only embedding and head.
    Of equally good splits the most even one is taken, in which earlier stages tend to have fewer layers, because they keep
    more microbatches.

    Args:
        seconds: for every stage, on its device, the seconds of what precedes the layers, of each layer, and of what follows.
        most: maximum number of layers per stage; by default all.

    Raises:
        InputError: too few layers for the stages, or more than fit on them.

    >>> def equal(num, first, last, *rates):
    ...     return [np.array([first, *[rate] * num, last]) for rate in rates]
    >>> balanced_layers(equal(10, 0.1, 1.5, *[1.0] * 4)), balanced_layers(equal(9, 0.0, 0.0, *[1.0] * 4))
    ((3, 3, 3, 1), (2, 2, 2, 3))
    >>> balanced_layers(equal(12, 0.0, 0.0, 1.0, 1.0, 2.0)), balanced_layers(equal(12, 0, 0, 1.0, 1.0, 2.0), [3, 12, 12])
    ((5, 5, 2), (3, 6, 3))
    >>> balanced_layers(equal(6, 0.1, 1.5, *[1.0] * 8))
    (0, 1, 1, 1, 1, 1, 1, 0)
    """
    num_stages, num_layers = len(seconds), len(seconds[0]) - 2
    if num_layers < fewest_layers(num_stages):
        raise InputError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer stages")
    most = most or [num_layers] * num_stages
    if sum(most) < num_layers or min(most) < 1:
        raise InputError(
            f"{num_layers} layers do not fit on stages that hold at most {list(most)}: choose more stages"
        )
    least = [1] * num_stages
    if num_stages > 2:
        least[0] = least[-1] = 0
    costs = list(_stage_costs(seconds, least, most))
    longest = _best(costs, np.maximum)[0] * (1 + 1e-9)
    if not np.isfinite(longest):
        raise InputError(
            f"{num_layers} layers do not fit on stages that hold at most {list(most)}: choose more stages"
        )
    even = [np.where(cost <= longest, cost * cost, np.inf) for cost in costs]
    return _best(even, np.add)[1]


def dealt_layers(seconds: Sequence[Floats], num_chunks: int) -> tuple[int, ...]:
    """Return the numbers of layers of stages dealt out to the ranks in turn, `num_chunks` to each, so that ranks take about
    equally long.

    Every stage has at least one layer; the last may have only the head. Layers go one by one to the rank that is done first
    with one more, and there to its first stage of fewest layers.

    Args:
        seconds: for every rank, on its device, the seconds of what precedes the layers, of each layer, and of what follows.

    Raises:
        InputError: too few layers for the stages.

    >>> equal = [np.array([0.0, *[1.0] * 12, 2.0])] * 2
    >>> dealt_layers(equal, 3), dealt_layers([equal[0], 2 * equal[1]], 2)
    ((3, 2, 2, 2, 2, 1), (5, 2, 5, 0))
    """
    num_ranks, num_layers = len(seconds), len(seconds[0]) - 2
    num_stages = num_ranks * num_chunks
    if num_layers < num_stages - 1:
        raise InputError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer")
    counts = [1] * (num_stages - 1) + [0]
    layer_s = [float(rank_seconds[1:-1].mean()) for rank_seconds in seconds]
    taken = [sum(counts[rank::num_ranks]) * layer_s[rank] for rank in range(num_ranks)]
    taken[0] += float(seconds[0][0])
    taken[-1] += float(seconds[-1][-1])
    for _ in range(num_layers - sum(counts)):
        rank = min(range(num_ranks), key=lambda rank: taken[rank] + layer_s[rank])
        stages = range(rank, num_stages, num_ranks)
        counts[min(stages, key=lambda stage: counts[stage] + (stage == num_stages - 1))] += 1
        taken[rank] += layer_s[rank]
    return tuple(counts)


def _stage_costs(seconds: Sequence[Floats], least: Sequence[int], most: Sequence[int]) -> Iterator[Floats]:
    """Yield, for every stage, its seconds with the layers from one (row) up to another (column); infinite where that is not
    allowed."""
    num_layers = len(seconds[0]) - 2
    places = np.arange(num_layers + 1)
    counts = places - places[:, None]
    sums: dict[bytes, Floats] = {}
    for stage, layer_seconds in enumerate(seconds):
        if (alike := layer_seconds.tobytes()) not in sums:
            column = np.concatenate([[0.0], np.cumsum(layer_seconds[1:-1])])
            sums[alike] = column - column[:, None]
        around = layer_seconds[0] * (stage == 0) + layer_seconds[-1] * (stage == len(seconds) - 1)
        allowed = (counts >= least[stage]) & (counts <= most[stage])
        yield np.where(allowed, sums[alike] + around, np.inf)


def _best(costs: Sequence[Floats], join: Callable[[Floats, Floats], Floats]) -> tuple[float, tuple[int, ...]]:
    """Return the least total and the layers per stage of a split that attains it; `join` adds a stage to those before."""
    totals, came = costs[0][0], list[Ints]()
    for cost in costs[1:]:
        joined = join(totals[:, None], cost)
        came.append(joined.argmin(axis=0))
        totals = joined.min(axis=0)
    counts, end = [], len(totals) - 1
    for starts in reversed(came):
        counts.append(end - int(starts[end]))
        end = int(starts[end])
    return float(totals[-1]), (end, *reversed(counts))


def fewest_layers(num_stages: int) -> int:
    """Return the minimum number of layers for `num_stages` stages.

    >>> [fewest_layers(num) for num in (1, 2, 3, 16)]
    [1, 2, 1, 14]
    """
    return num_stages if num_stages <= 2 else num_stages - 2
