"""Graphs of several sizes of one model, traced by several processes at once, which leave them in the cache."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from stagewright.errors import StagewrightError
from stagewright.machine import collect_seldom, num_more_processes, python_command
from stagewright.tracing.cache import note_refused, to_trace, trace
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import ModelReference, resolve

_BYTES = 1.5 * 2**30
"""Memory of a process in bytes, estimated generously."""
_EACH = 2
"""Graphs that a process has at a time, the one that it traces among them, where it is not known which are needed."""


class Ahead:
    """Processes that trace graphs ahead of calls of `stagewright.tracing.cache.trace`, while this is open.

    Best effort: graphs that cannot be traced, or that a process leaves undone, are left to the caller. Only this process
    runs the code of a factory.
    """

    def __init__(
        self,
        model: ModelReference,
        settings: Sequence[Mapping[str, Any]],
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`settings`: arguments of all calls that may follow."""
        self._model, self._settings, self._report = model, list(settings), report
        self._given: set[int] = set()  # indices into the settings
        self._num_done = 0
        self._workers: list[subprocess.Popen[str]] = []
        self._queue, self._to_queue = os.pipe()  # of such indices, each for the process that reads it first
        self._done, self._to_done = os.pipe()  # a byte per graph
        os.set_blocking(self._queue, False)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        for end in (self._queue, self._to_queue, self._done, self._to_done):
            os.close(end)

    @property
    def has_room(self) -> bool:
        """Whether `start` may give more graphs to other processes."""
        self._count(0.0)
        return not self._workers or self._num_waiting < _EACH * len(self._workers)

    def start(self, wanted: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Let other processes trace missing graphs of `wanted`, the first ones first, until each has one more to go on with;
        `own` ones the caller traces meanwhile. Return whether any of both is missing."""
        missing = to_trace(self._model, [*own, *wanted])
        if self.has_room:
            self._give([setting for setting in missing if setting not in own], 1)
        return bool(missing)

    def share(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Let other processes trace all missing graphs of `wanted`, the first ones first; none is started for a single one.
        The caller traces some of them in `bring`."""
        self._count(0.0)
        self._give(to_trace(self._model, wanted), 2, most=len(wanted))

    def bring(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Share the missing graphs of `wanted` and trace some of them, until the first is in the cache, or follows from
        others there, or there is no process to wait for."""
        while to_trace(self._model, wanted[:1]):
            self.share(wanted)
            if (place := _next(self._queue, 0)) is not None:
                self._say()
                _trace(self._model, self._settings[place])
                self._num_done += 1
            elif self._num_waiting > 0 and all(worker.poll() is None for worker in self._workers):
                self._say()
                self._count(1.0)
            else:
                return

    def _give(self, missing: Sequence[Mapping[str, Any]], fewest: int, most: int = 0) -> None:
        """Give graphs to processes, until there are `most`, or `_EACH` for each; so many are worth starting some, each of
        which first imports torch."""
        places = [self._settings.index(setting) for setting in missing if setting in self._settings]
        places = [place for place in places if place not in self._given]
        num = min(num_more_processes(_BYTES), len(places))
        if self._model.kind == "factory" or not sys.executable or not num:
            return
        if not self._workers and len(places) < fewest:
            return
        with contextlib.suppress(OSError):  # no process can be started
            while len(self._workers) < num:
                self._workers.append(self._worker())
        if self._workers:
            places = places[: max(0, (most or _EACH * len(self._workers)) - self._num_waiting)]
            self._given.update(places)
            os.write(self._to_queue, b"".join(place.to_bytes(2) for place in places))

    def _worker(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        worker = subprocess.Popen(
            python_command(__name__), env=environment, text=True, pass_fds=[self._queue],
            stdin=subprocess.PIPE, stdout=self._to_done, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert worker.stdin is not None
        model, lora = self._model, self._model.lora
        adapters = None if lora is None else lora.model_dump(mode="json")
        request = [self._queue, model.text, dict(model.overrides), adapters, model.digest, self._settings]
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        return worker

    @property
    def _num_waiting(self) -> int:
        return len(self._given) - self._num_done

    def _count(self, patience_s: float) -> int:
        """Count graphs that others have done since, and return their number; wait for the first as long as that."""
        if not select.select([self._done], [], [], patience_s)[0]:
            return 0
        num = len(os.read(self._done, 2**16))
        self._num_done += num
        return num

    def _say(self) -> None:
        if self._given:
            self._report(
                f"{self._num_done} of {len(self._given)} graphs, on {1 + len(self._workers)} processes"
            )


def _next(queue: int, patience_s: float | None) -> int | None:
    """Return the index of the next graph; None if there is none within `patience_s`, or the queue is closed."""
    while select.select([queue], [], [], patience_s)[0]:
        with contextlib.suppress(BlockingIOError):  # another process was faster
            read = os.read(queue, 2)
            return int.from_bytes(read) if read else None
    return None


def _trace(model: ModelReference, settings: Mapping[str, Any]) -> None:
    try:
        trace(model, **settings)
    except StagewrightError:
        note_refused(model, settings)


def _work() -> None:
    """Trace graphs from the queue until it is closed or the parent process ends."""
    results = os.dup(1)
    os.dup2(2, 1)  # other output must not be taken for a finished graph
    queue, text, overrides, adapters, digest, settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    model = resolve(text, overrides).adapted(None if adapters is None else Lora.model_validate(adapters))
    if model.digest != digest:  # its file has changed since
        return
    while (place := _next(queue, None)) is not None:
        _trace(model, settings[place])
        os.write(results, b".")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    collect_seldom()
    _work()
