"""Progress of long work: one line on a terminal's stderr, shown after one second and removed when the work is done."""

from __future__ import annotations

import re
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stagewright.text import printable

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

DELAY_SECONDS = 1.0
_LEAST_SECONDS, _LEAST_DONE = 1.0, 0.02
"""Minimum seconds and fraction of work observed before the remaining time is estimated."""
_SPINNER = 3
"""Columns for the spinner before the line and one space after it."""
_COUNT = re.compile(r"\b(\d+) of (\d+)\b")


@dataclass(frozen=True)
class WatchedWork:
    """A phase of work: its start time and the fraction done then."""

    began_s: float
    began_at: float = 0.0

    def left_s(self, now_s: float, done: float) -> float | None:
        """Return the remaining seconds at the rate so far; None if too little was observed.

        >>> WatchedWork(10.0).left_s(12.0, 0.25), WatchedWork(10.0).left_s(10.1, 0.25)
        (6.0, None)
        >>> WatchedWork(10.0, 0.5).left_s(20.0, 0.5)
        """
        elapsed, gained = now_s - self.began_s, done - self.began_at
        if elapsed < _LEAST_SECONDS or gained < _LEAST_DONE:
            return None
        return elapsed * (1 - done) / gained


def roughly(seconds: float) -> str:
    """Return a rounded duration.

    >>> roughly(8.4), roughly(95.0), roughly(5400.0)
    ('8 s', '2 min', '1.5 h')
    """
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def counted(text: str) -> float | None:
    """Return the fraction done that a text such as ``3 of 10`` gives; None if it gives none.

    >>> counted("120 of 480: dp 2 x pp 4"), counted("writing file 3 of 4"), counted("tracing"), counted("0 of 0")
    (0.25, 0.75, None, None)
    """
    match = _COUNT.search(text)
    return min(int(match[1]) / int(match[2]), 1.0) if match and int(match[2]) else None


class Progress:
    """A line on stderr with the current work and, where it can be estimated, the remaining time.

    Use as a context manager; call it with the current work and, if known, the fraction done, which is read from a text such
    as ``3 of 10``.
    """

    def __init__(self, title: str) -> None:
        self._text = title
        self._fraction: float | None = None
        self._watched: WatchedWork | None = None
        self._status: Status | None = None
        self._width = 80
        self._over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(DELAY_SECONDS, self._start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __call__(self, text: str, fraction: float | None = None) -> None:
        with self._lock:
            fraction = counted(text) if fraction is None else fraction
            if (
                fraction is None or self._fraction is None or fraction < self._fraction
            ):  # another phase of work
                self._watched = None if fraction is None else WatchedWork(time.monotonic(), fraction)
            self._text, self._fraction = text, fraction
            if self._status is not None:
                self._status.update(self._line())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._status is not None:
                self._status.stop()
                self._status = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.status import Status

        with self._lock:
            if not self._over:
                console = Console(stderr=True)
                self._width = console.width
                self._status = Status(self._line(), console=console, refresh_per_second=4)
                self._status.start()

    def _line(self) -> Text:
        """Return the line without interpreting styles in the text, which is truncated to fit."""
        from rich.text import Text

        done = "" if self._fraction is None else f" {self._fraction:.0%}"
        if self._fraction is not None and self._watched is not None:
            left_s = self._watched.left_s(time.monotonic(), self._fraction)
            done += "" if left_s is None else f", about {roughly(left_s)} left"
        line = Text(printable(self._text))
        line.truncate(max(self._width - len(done) - _SPINNER, 1), overflow="ellipsis")
        return line.append(done)
