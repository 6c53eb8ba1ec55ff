"""For verbs that build millions of small objects, print one answer and end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, reference cycles are not looked for: graphs and programs are free of them and live to the end, so
    that the passes over all of them were a third of a verb's time and freed nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
