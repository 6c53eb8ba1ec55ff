"""Progress of long work: on stderr, on a terminal, after two seconds, and gone when the work is done."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stagewright.text import printable

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

DELAY_SECONDS = 2.0


class Progress:
    """A line on stderr that says what is being done.

    Use as a context manager; call it with what happens now and, where known, the fraction already done.
    """

    def __init__(self, title: str) -> None:
        self._text = title
        self._fraction: float | None = None
        self._status: Status | None = None
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
                self._status = Status(self._line(), console=Console(stderr=True), refresh_per_second=4)
                self._status.start()

    def _line(self) -> Text:
        """Of which nothing is taken for styles."""
        from rich.text import Text

        done = "" if self._fraction is None else f" {self._fraction:.0%}"
        return Text(printable(f"{self._text}{done}"))
