"""Critical path of a timeline: the chain of actions and transfers that the end of a batch waits for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stagewright.simulation.timeline import Timeline


def critical_path(timeline: Timeline) -> NDArray[np.int64]:
    """Return the indices of the actions on the path to the last end, first to last: the predecessor of each is the previous
    action of its rank or the maker of one of its inputs, whichever was available last.

    Ignores: transfers that wait for a link that others use; their maker counts as the cause.
    """
    if not timeline.encoded.num_actions:
        return np.zeros(0, np.int64)
    maker, rank = _makers(timeline), _ranks(timeline)
    before = _before_on_stream(timeline, rank), _computation_before(timeline)
    path = [int(np.lexsort((np.arange(len(timeline.end_s)), timeline.end_s))[-1])]
    seen = {*path}  # actions that take no time can wait for each other's tokens at one instant
    while (cause := _cause(timeline, path[-1], maker, before)) >= 0 and cause not in seen:
        path.append(cause)
        seen.add(cause)
    return np.array(path[::-1], np.int64)


def _cause(
    timeline: Timeline, action: int, maker: NDArray[np.int64], before: tuple[NDArray[np.int64], ...]
) -> int:
    """Return the action that `action` waited for last; -1 for the first."""
    tables, encoded = timeline.structure.tables, timeline.encoded
    pattern, microbatch = encoded.pattern[action], encoded.microbatch[action]
    needs = slice(tables.need_offsets[pattern], tables.need_offsets[pattern + 1])
    tokens = tables.need_first[needs] + microbatch * tables.need_step[needs]
    waits = [
        _available(timeline, action, int(token), int(maker[token])) for token in tokens if maker[token] >= 0
    ]
    waits += [
        (float(timeline.end_s[previous[action]]), int(previous[action]))
        for previous in before
        if previous[action] >= 0
    ]
    return max(waits, default=(0.0, -1), key=lambda wait: wait[0])[1]


def _available(timeline: Timeline, action: int, token: int, maker: int) -> tuple[float, int]:
    """Return when a token that `action` needs was available, and its maker: if several make it in a batch (as for gathered
    parameters), the last one before the action."""
    if timeline.end_s[maker] <= timeline.start_s[action]:
        return float(timeline.token_s[token]), maker
    encoded, until = timeline.encoded, timeline.start_s[action]
    alike = (encoded.pattern == encoded.pattern[maker]) & (encoded.microbatch == encoded.microbatch[maker])
    earlier = np.flatnonzero(alike & (timeline.end_s <= until) & (np.arange(encoded.num_actions) < action))
    return (float(timeline.end_s[earlier[-1]]), int(earlier[-1])) if len(earlier) else (0.0, -1)


def _makers(timeline: Timeline) -> NDArray[np.int64]:
    """Return the action that makes each token; -1 where none does."""
    tables, encoded = timeline.structure.tables, timeline.encoded
    maker = np.full(timeline.structure.num_tokens, -1, np.int64)
    for pattern in range(len(encoded.patterns)):
        actions = np.flatnonzero(encoded.pattern == pattern)
        for index in range(tables.make_offsets[pattern], tables.make_offsets[pattern + 1]):
            maker[tables.make_first[index] + encoded.microbatch[actions] * tables.make_step[index]] = actions
    return maker


def _ranks(timeline: Timeline) -> NDArray[np.int64]:
    return np.repeat(np.arange(timeline.num_ranks), np.diff(timeline.encoded.offsets))


def _before_on_stream(timeline: Timeline, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the previous action of each action on its rank and stream; -1 for the first."""
    stream = timeline.structure.tables.stream[timeline.encoded.pattern]
    order = np.lexsort((np.arange(len(rank)), stream, rank))
    before = np.full(len(rank), -1, np.int64)
    is_same = (rank[order][1:] == rank[order][:-1]) & (stream[order][1:] == stream[order][:-1])
    before[order[1:][is_same]] = order[:-1][is_same]
    return before


def _computation_before(timeline: Timeline) -> NDArray[np.int64]:
    """Return the previous computation of each action on its rank, which other streams wait for too; -1 for the first."""
    index = np.arange(timeline.encoded.num_actions)
    latest = np.maximum.accumulate(np.where(timeline.is_compute, index, -1))
    before = np.concatenate([[-1], latest[:-1]])
    firsts = np.repeat(timeline.encoded.offsets[:-1], np.diff(timeline.encoded.offsets))
    return np.where(before < firsts, -1, before)
