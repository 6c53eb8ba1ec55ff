"""Progress of long work: on stderr, on a terminal, after two seconds, and gone when the work is done."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self

DELAY_SECONDS = 2.0


class Progress:
    """A line on stderr that says what is being done.

    Use as a context manager; call it with what happens now and, where known, the fraction already done.
    """

    def __init__(self, title: str) -> None:
        self._text = title
        self._fraction: float | None = None
        self._bar = None
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
            self._update()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with self._lock:
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._text, total=None)
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is None:
            return
        total = None if self._fraction is None else 1.0
        self._bar.update(self._task, description=self._text, total=total, completed=self._fraction or 0.0)
