"""Graphs of several sizes of one model, traced by several processes at once, which leave them in the cache."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagewright.errors import StagewrightError
from stagewright.machine import free_bytes, num_cores
from stagewright.tracing.cache import note_refused, to_trace, trace
from stagewright.tracing.models.reference import ModelReference, resolve

_FEWEST = 6
"""Graphs for which it is worth while to start processes, each of which imports torch first."""
_MOST = 8
_BYTES = 1.5 * 2**30
"""What a process takes of the machine's memory, generously."""


def trace_ahead(
    model: ModelReference,
    asked: Sequence[Mapping[str, Any]],
    report: Callable[[str], None] = lambda stage: None,
) -> None:
    """Trace what is `asked` of `stagewright.tracing.cache.trace`, keywords of one call each, as far as it is not known.

    Best effort: what cannot be traced, and what a process leaves undone, is left to whoever asks for it. Code of a factory
    is run by this process alone.
    """
    if model.kind == "factory" or not sys.executable:
        return
    tried: list[Mapping[str, Any]] = []
    for _ in range(2):  # some do not follow from others as was hoped
        missing = [one for one in to_trace(model, asked) if one not in tried]
        if len(missing) < _FEWEST:
            return
        try:
            _trace_together(model, missing, report)
        except OSError:  # no processes to be had
            return
        tried += missing


def _trace_together(
    model: ModelReference, missing: Sequence[Mapping[str, Any]], report: Callable[[str], None]
) -> None:
    num = min(_room(), len(missing))
    if num < 2:
        return
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    workers: list[subprocess.Popen[str]] = []
    try:
        for first in range(num):
            worker = subprocess.Popen(
                # Nothing of the current folder is imported (-P).
                [sys.executable, "-P", "-m", __name__], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            workers.append(worker)
            assert worker.stdin is not None
            asked = [model.text, dict(model.overrides), model.digest, missing[first::num]]
            worker.stdin.write(json.dumps(asked) + "\n")
            worker.stdin.flush()
        _follow(workers, len(missing), report)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _room() -> int:
    """How many processes the machine has processors and memory for."""
    return min(num_cores(), int(min(free_bytes() / _BYTES, _MOST)))


def _follow(workers: Sequence[subprocess.Popen[str]], total: int, report: Callable[[str], None]) -> None:
    """Until all have ended; each sends a byte per graph."""
    num_done = 0
    with selectors.DefaultSelector() as waiting:
        for worker in workers:
            if worker.stdout is not None:
                waiting.register(worker.stdout, selectors.EVENT_READ)
        while waiting.get_map():
            report(f"{num_done} of {total} graphs, on {len(workers)} processes")
            for key, _ in waiting.select():
                if os.read(key.fd, 1):
                    num_done += 1
                else:
                    waiting.unregister(key.fileobj)


def _work() -> None:
    """What one process does, as long as the one that started it is there."""
    told = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no word of a graph
    text, overrides, digest, asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    model = resolve(text, overrides)
    if model.digest != digest:  # its file has changed meanwhile
        return
    for one in asked:
        try:
            trace(model, **one)
        except StagewrightError:
            note_refused(model, one)
        os.write(told, b".")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _work()
