"""Bytes on every rank over time."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from stagewright.schedule.action import Action
from stagewright.simulation.costs import StageCosts
from stagewright.simulation.streams import COMPUTE_STREAM, STREAM_OF

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes on one rank: `num_bytes[i]` from `time_s[i]` until the next entry."""

    time_s: Floats
    num_bytes: Floats

    @property
    def peak_bytes(self) -> float:
        return float(self.num_bytes.max())


@dataclass(frozen=True, eq=False)
class PatternBytes:
    """Per pattern of action: bytes that appear at its start, go at its end, and exist only in between."""

    at_start: Floats
    at_end: Floats
    transient: Floats
    follows_program_order: bool
    """Whether only computations change memory, so that the order of the program is the order in time."""

    @classmethod
    def of(cls, patterns: tuple[Action, ...], recomputed: frozenset[int], costs: StageCosts) -> PatternBytes:
        table = np.zeros((3, len(patterns)))
        for index, pattern in enumerate(patterns):
            for part in pattern.parts:
                table[0, index] += costs.bytes_at_start(part.kind, part.stage, part.stage in recomputed)
                table[1, index] += costs.bytes_at_end(part.kind, part.stage)
                table[2, index] += costs.transient_bytes(part.kind, part.stage)
        beside = np.array([STREAM_OF[p.kind] != COMPUTE_STREAM for p in patterns])
        return cls(table[0], table[1], table[2], not table[:, beside].any())


def memory_curve(
    pattern: NDArray[np.int32], start: Floats, end: Floats, table: PatternBytes, base_bytes: float
) -> MemoryCurve:
    """The curve of a rank that runs `pattern` from `start` to `end` on top of `base_bytes`.

    Of events at one instant the earlier in program order comes first, an action's start before its end.
    """
    time = np.column_stack([start, end]).ravel()
    appear = (table.at_start + table.transient)[pattern]
    go = (table.at_end + table.transient)[pattern]
    change = np.column_stack([appear, -go]).ravel()
    order = np.argsort(time, kind="stable")
    time_s = np.concatenate([[0.0], time[order]])
    return MemoryCurve(time_s, base_bytes + np.concatenate([[0.0], np.cumsum(change[order])]))


@numba.njit(cache=True, nogil=True)
def peaks_in_program_order(pattern, offsets, at_start, at_end, transient, base_bytes):
    """Peak bytes of every rank when events happen in program order."""
    peaks = base_bytes.copy()
    for rank in range(len(offsets) - 1):
        now = base_bytes[rank]
        for index in range(offsets[rank], offsets[rank + 1]):
            p = pattern[index]
            now += at_start[p]
            peaks[rank] = max(peaks[rank], now + transient[p])
            now -= at_end[p]
    return peaks
