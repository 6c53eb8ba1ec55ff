"""The critical path of a timeline: the actions and transfers that the end of a batch waits for, one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stagewright.simulation.timeline import Timeline


def critical_path(timeline: Timeline) -> NDArray[np.int64]:
    """Indices of the actions, first to last, that lead to the one that ends last: before each its rank's action, or the
    maker of what it needs, whichever was done or at hand last.

    Ignores: transfers that wait for a link that others use; their maker is taken for the cause.
    """
    if not timeline.encoded.num_actions:
        return np.zeros(0, np.int64)
    maker, rank = _makers(timeline), _ranks(timeline)
    before = _before_on_stream(timeline, rank)
    path = [int(np.lexsort((np.arange(len(timeline.end_s)), timeline.end_s))[-1])]
    seen = {*path}  # actions that take no time can wait for each other's tokens at one instant
    while (cause := _cause(timeline, path[-1], maker, before)) >= 0 and cause not in seen:
        path.append(cause)
        seen.add(cause)
    return np.array(path[::-1], np.int64)


def _cause(timeline: Timeline, action: int, maker: NDArray[np.int64], before: NDArray[np.int64]) -> int:
    """What `action` waited for last; -1 for the first."""
    tables, encoded = timeline.structure.tables, timeline.encoded
    pattern, microbatch = encoded.pattern[action], encoded.microbatch[action]
    needs = slice(tables.need_offsets[pattern], tables.need_offsets[pattern + 1])
    tokens = tables.need_first[needs] + microbatch * tables.need_step[needs]
    waits = [(float(timeline.token_s[token]), int(maker[token])) for token in tokens if maker[token] >= 0]
    if before[action] >= 0:
        waits.append((float(timeline.end_s[before[action]]), int(before[action])))
    return max(waits, default=(0.0, -1), key=lambda one: one[0])[1]


def _makers(timeline: Timeline) -> NDArray[np.int64]:
    """Per token the action that makes it; -1 where none does."""
    tables, encoded = timeline.structure.tables, timeline.encoded
    maker = np.full(timeline.structure.num_tokens, -1, np.int64)
    for pattern in range(len(encoded.patterns)):
        actions = np.flatnonzero(encoded.pattern == pattern)
        for made in range(tables.make_offsets[pattern], tables.make_offsets[pattern + 1]):
            maker[tables.make_first[made] + encoded.microbatch[actions] * tables.make_step[made]] = actions
    return maker


def _ranks(timeline: Timeline) -> NDArray[np.int64]:
    return np.repeat(np.arange(timeline.num_ranks), np.diff(timeline.encoded.offsets))


def _before_on_stream(timeline: Timeline, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per action the one before it on its rank that runs on the same stream; -1 for the first."""
    stream = timeline.structure.tables.stream[timeline.encoded.pattern]
    order = np.lexsort((np.arange(len(rank)), stream, rank))
    before = np.full(len(rank), -1, np.int64)
    is_same = (rank[order][1:] == rank[order][:-1]) & (stream[order][1:] == stream[order][:-1])
    before[order[1:][is_same]] = order[:-1][is_same]
    return before
