"""Ctrl-C, which a terminal sends to every process of a command at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C from their first moment on; whoever starts them has to end them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only there can be said what a signal does
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
