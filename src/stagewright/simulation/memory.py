"""Memory of every rank over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats
from stagewright.compiled import compiled
from stagewright.simulation.costs import StageCosts
from stagewright.simulation.streams import COMPUTE_STREAM
from stagewright.simulation.structure import Structure


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
    """Bytes per pattern of action: allocated at its start, freed at its end, and those that exist only in between."""

    at_start: Floats
    at_end: Floats
    transient: Floats
    follows_program_order: bool
    """Whether only computations change memory, so that the order of the program is the order in time."""

    @classmethod
    def of(cls, structure: Structure, costs: StageCosts) -> PatternBytes:
        at_start = structure.per_pattern(costs.bytes_at_start)
        at_end = structure.per_pattern(costs.bytes_at_end)
        transient = structure.per_pattern(costs.transient_bytes)
        off_compute = structure.tables.stream != COMPUTE_STREAM
        others_change = any(part[off_compute].any() for part in (at_start, at_end, transient))
        return cls(at_start, at_end, transient, follows_program_order=not others_change)


def memory_curve(
    pattern: NDArray[np.int32], start: Floats, end: Floats, table: PatternBytes, base_bytes: float
) -> MemoryCurve:
    """Return the memory of a rank that runs `pattern` from `start` to `end`, on top of `base_bytes`.

    Simultaneous events have program order, with an action's start before its end.
    """
    time = np.column_stack([start, end]).ravel()
    allocated = (table.at_start + table.transient)[pattern]
    freed = (table.at_end + table.transient)[pattern]
    change = np.column_stack([allocated, -freed]).ravel()
    order = np.argsort(time, kind="stable")
    time_s = np.concatenate([[0.0], time[order]])
    return MemoryCurve(time_s, base_bytes + np.concatenate([[0.0], np.cumsum(change[order])]))


@compiled
def peaks_in_program_order(pattern, offsets, at_start, at_end, transient, base_bytes):
    """Return the peak bytes of every rank if events happen in program order."""
    peaks = base_bytes.copy()
    for rank in range(len(offsets) - 1):
        now = base_bytes[rank]
        for index in range(offsets[rank], offsets[rank + 1]):
            p = pattern[index]
            now += at_start[p]
            peaks[rank] = max(peaks[rank], now + transient[p])
            now -= at_end[p]
    return peaks
