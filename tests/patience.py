"""Time limits of tests, which are longer on a machine that has much else to do.

A limit says how long something takes at most where only the tests run. How much longer it may take is measured, not guessed:
by how long a thread waits for a moment of a processor.
"""

from __future__ import annotations

import time

MOST = 8.0
"""Times a limit, however slow the machine is: what hangs is to end some time."""
_MEASURED_S, _LASTS_S = 0.03, 5.0
_measured: list[tuple[float, float]] = []
"""When slowness was measured last, and what it was."""


def slowness() -> float:
    """Seconds that pass here until a thread has had one second of a processor: 1 on a machine that does nothing else."""
    now = time.monotonic()
    if not _measured or now - _measured[-1][0] > _LASTS_S:
        _measured[:] = [(time.monotonic(), _seconds_per_second())]
    return _measured[-1][1]


def _seconds_per_second() -> float:
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _MEASURED_S:
        pass
    passed = time.monotonic() - began
    return min(max(passed / (time.thread_time() - used), 1.0), MOST)


def patient(seconds: float) -> float:
    """What takes `seconds` at most, with what else the machine has to do now."""
    return seconds * slowness()


class Deadline:
    """`seconds` from now, and longer where the machine is busy: now, or at the time when they seem to be over."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self._seconds = seconds
        self._slowness = slowness()

    def left(self) -> float:
        """Seconds; not more than 0 once it is over."""
        left = self._left()
        if left <= 0:
            self._slowness = max(self._slowness, slowness())
        return self._left() if left <= 0 else left

    def __bool__(self) -> bool:
        """Whether there is time left."""
        return self.left() > 0

    def _left(self) -> float:
        return self.began + self._seconds * self._slowness - time.monotonic()
