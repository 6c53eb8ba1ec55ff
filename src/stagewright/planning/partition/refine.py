"""Small moves of the cuts of a partition, for where costs are not monotone: offloading hides more in a longer stage."""

from __future__ import annotations

import itertools
import math

import numpy as np

from stagewright.planning.partition.binary import binary
from stagewright.planning.partition.bisection import Found, bisect, bottleneck
from stagewright.planning.partition.leaves import Leaves

_STEPS = (1, -1, 2, -2, 4, -4, 8, -8)
_ROUNDS = 20


def best_partition(leaves: Leaves) -> Found | None:
    """The better one of bisection and, where stages offload and the former is not exact, halving, its cuts moved as long as
    that makes the slowest stage faster; None if nothing fits."""
    found = bisect(leaves)
    if found is None:  # which it says only where there is nothing to find
        return None
    offloads = any(math.isfinite(terms.link_s_per_byte) for terms in leaves.terms)
    halved = binary(leaves) if offloads else None
    return refined(leaves, halved if halved is not None and halved.seconds < found.seconds else found)


def refined(leaves: Leaves, found: Found) -> Found:
    """`found` with single cuts, or two neighbouring ones together, moved by a few positions."""
    legal = leaves.ranges.legal
    for _ in range(_ROUNDS):
        better = _moved(leaves, found, [int(np.searchsorted(legal, cut)) for cut in found.cuts])
        if better is None:
            break
        found = better
    return found


def narrowed(leaves: Leaves, found: Found, slack: float) -> Found:
    """`found` with every cut moved to the narrowest boundary at which both its stages take at most ``1 + slack`` times the
    bottleneck."""
    limit = found.seconds * (1 + slack)
    legal = leaves.ranges.legal
    cuts = list(found.cuts)
    for index, cut in enumerate(cuts):
        start = cuts[index - 1] if index else 0
        stop = cuts[index + 1] if index + 1 < len(cuts) else leaves.ranges.size
        place = int(np.searchsorted(legal, cut))

        def fits(at: int, index: int = index, start: int = start, stop: int = stop) -> bool:
            middle = int(legal[at])
            return (
                start < middle < stop
                and max(leaves.cost(index, start, middle), leaves.cost(index + 1, middle, stop)) <= limit
            )

        low = high = place
        while low > 0 and fits(low - 1):
            low -= 1
        while high + 1 < len(legal) and fits(high + 1):
            high += 1
        around = legal[low : high + 1]
        cuts[index] = int(around[np.argmin(leaves.ranges.boundary_bytes[around])])
    return Found(tuple(cuts), bottleneck(leaves, tuple(cuts)))


def _moved(leaves: Leaves, found: Found, places: list[int]) -> Found | None:
    """The first move that helps, of the cuts beside the slowest stage."""
    legal = leaves.ranges.legal
    slowest = _slowest(leaves, found.cuts)
    for cut in {slowest - 1, slowest} & set(range(len(places))):
        for step in _STEPS:
            for moved in ({cut}, {cut - 1, cut}, {cut, cut + 1}):
                tried = [place + step * (index in moved) for index, place in enumerate(places)]
                if not _in_order(tried, len(legal)):
                    continue
                cuts = tuple(int(legal[place]) for place in tried)
                seconds = bottleneck(leaves, cuts)
                if seconds < found.seconds * (1 - 1e-9):
                    return Found(cuts, seconds)
    return None


def _slowest(leaves: Leaves, cuts: tuple[int, ...]) -> int:
    ends = (0, *cuts, leaves.ranges.size)
    costs = [leaves.cost(stage, ends[stage], ends[stage + 1]) for stage in range(leaves.num_stages)]
    return costs.index(max(costs))


def _in_order(places: list[int], count: int) -> bool:
    bounds = [-1, *places, count]
    return all(a < b for a, b in itertools.pairwise(bounds))
