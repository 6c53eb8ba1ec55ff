"""Graphs of several sizes of one model, traced by several processes at once, which leave them in the cache."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagewright.errors import StagewrightError
from stagewright.tracing.cache import to_trace, trace
from stagewright.tracing.models.reference import ModelReference, resolve

_FEWEST = 6
"""Graphs for which it is worth while to start processes, each of which imports torch first."""
_MOST = 8
"""Processes; each takes about a gibibyte."""


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
    for _ in range(2):  # some do not follow from others as was hoped
        missing = to_trace(model, asked)
        if len(missing) < _FEWEST:
            return
        try:
            _trace_together(model, missing, report)
        except OSError:  # no processes to be had
            return


def _trace_together(
    model: ModelReference, missing: Sequence[Mapping[str, Any]], report: Callable[[str], None]
) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num = min(cores, _MOST, len(missing))
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
                [sys.executable, "-m", __name__], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            workers.append(worker)
            assert worker.stdin is not None
            with worker.stdin as pipe:
                json.dump([model.text, dict(model.overrides), model.digest, missing[first::num]], pipe)
        _follow(workers, len(missing), report)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()


def _follow(workers: Sequence[subprocess.Popen[str]], total: int, report: Callable[[str], None]) -> None:
    """Until all have ended; each says a line per graph."""
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
    """What one process does."""
    text, overrides, digest, asked = json.load(sys.stdin)
    model = resolve(text, overrides)
    if model.digest != digest:  # its file has changed meanwhile
        return
    for one in asked:
        try:
            trace(model, **one)
        except StagewrightError:
            continue
        finally:
            os.write(1, b".")


if __name__ == "__main__":
    _work()
