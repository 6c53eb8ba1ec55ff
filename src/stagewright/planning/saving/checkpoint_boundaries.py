"""Checkpoint boundaries: values that are worth keeping because everything between two of them can be recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Ints
from stagewright.graph import OperatorGraph, Part

_WINDOWS = (6, 12, 24, 48, 96)
"""Operators on either side among which a cut must be the narrowest; windows grow until few enough bytes are chosen."""

_MOST_SHARE = 0.3
"""Maximum fraction of the saved bytes at checkpoint boundaries."""


def narrow_places(widths: Sequence[float] | NDArray[np.number], window: int) -> Ints:
    """Return the cuts with no narrower cut within `window` positions; ends do not count.

    >>> narrow_places([0, 5, 3, 5, 5, 2, 4, 0], 2).tolist()
    [2, 5]
    """
    inside = np.asarray(widths, np.float64)[1:-1]
    if not len(inside):
        return np.array([], np.int64)
    padded = np.pad(inside, window, constant_values=np.inf)
    least = np.lib.stride_tricks.sliding_window_view(padded, 2 * window + 1).min(axis=1)
    return np.flatnonzero(inside <= least) + 1


def checkpoint_boundaries(
    graph: OperatorGraph, widths: NDArray[np.number], saved: Sequence[int]
) -> tuple[frozenset[int], Ints]:
    """Return those of the storages `saved` (root values) that the forward carries across narrow cuts, and these cuts.

    `widths` are the bytes that cross each cut index. If these storages were recomputed, everything from the start of the
    stage would be recomputed at once.
    """
    place = {root: graph.position.get(graph.values[root].node, -1) for root in saved}
    last = _last_forward_use(graph)
    total = sum(graph.storage_bytes[root] for root in saved)
    chosen: frozenset[int] = frozenset()
    narrow = np.array([], np.int64)
    for window in _WINDOWS:
        narrow = narrow_places(widths, window)
        after = {root: np.searchsorted(narrow, place[root], side="right") for root in saved}
        chosen = frozenset(
            root for root in saved if after[root] < len(narrow) and narrow[after[root]] <= last.get(root, -1)
        )
        if sum(graph.storage_bytes[root] for root in chosen) <= _MOST_SHARE * total:
            break
    return chosen, narrow


def _last_forward_use(graph: OperatorGraph) -> dict[int, int]:
    """Return root -> index of the last forward operator that uses its storage."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD:
            for value in node.inputs:
                last[graph.values[value].storage] = graph.position[node.id]
    return last
