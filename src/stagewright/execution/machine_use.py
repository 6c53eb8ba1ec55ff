"""Use of the machine's cores by other programs during a measurement."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_WAITING = (3, 4)
"""Columns of a core's line that do not count as use: idle, and waiting for a device."""

MOST_OTHERS = 0.1
"""Fraction of the cores that other programs may use without a remark."""


@dataclass(frozen=True)
class MachineUse:
    """Seconds used until now: by the clock, on the cores of this process, and by this process and its ended children."""

    clock_s: float
    cores_s: float
    own_s: float
    num_cores: int

    @classmethod
    def now(cls) -> MachineUse | None:
        """Return the present use, or None where the system does not report it."""
        if not hasattr(os, "sched_getaffinity") or not _STAT.exists():
            return None
        cores = os.sched_getaffinity(0)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        process_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
        ticks = busy_ticks(_STAT.read_text(encoding="ascii"), cores)
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), process_s, len(cores))


def busy_ticks(stat: str, cores: Collection[int]) -> int:
    """Return the ticks in which `cores` were used, from the text of /proc/stat.

    >>> busy_ticks("cpu 9 9 9 9 9\\ncpu0 5 0 2 70 1 0 1 0 0 0\\ncpu1 1 1 1 90 0 0 0 0 0 0\\n", [0])
    8
    """
    lines = (line.split() for line in stat.splitlines())
    names = {f"cpu{core}" for core in cores}
    return sum(
        int(ticks)
        for name, *columns in lines
        if name in names
        for place, ticks in enumerate(columns[:8])  # later columns are of guests, and counted as user
        if place not in _WAITING
    )


def watch_others() -> Callable[[], float | None]:
    """Begin a measurement; return a function that returns, at its end, the cores that other programs used meanwhile."""
    before = MachineUse.now()
    return lambda: cores_of_others(before, MachineUse.now())


def cores_of_others(before: MachineUse | None, after: MachineUse | None) -> float | None:
    """Return the average number of cores that other programs used in between; None if negligible or unknown."""
    if before is None or after is None:
        return None
    clock = after.clock_s - before.clock_s
    cores = (after.cores_s - before.cores_s - (after.own_s - before.own_s)) / clock
    return round(cores, 2) if cores > MOST_OTHERS * after.num_cores else None
