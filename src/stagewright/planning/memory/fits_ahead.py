"""Fits of the entries that come next in a search, each in a forked process, on the cores that the search leaves idle.

A fit is used only for exactly the arguments it was made with, so the search is the same with any number of cores.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import BinaryIO, NamedTuple

from stagewright.machine import end, forked, num_more_processes
from stagewright.planning.memory.fitting import Entry, Fit, Miss

_WORTH_S = 0.2
"""Seconds of the latest fit from which processes are worth starting: to start and answer takes some hundredths."""


class Attempt(NamedTuple):
    """The arguments of a fit."""

    entry: Entry
    best_s: float
    longest_s: float
    lost_share: float


@dataclass
class FitsAhead:
    """The fits of a search, made by this process or ahead of it by others; close it at the end."""

    work_out: Callable[[Attempt], Fit | Miss]
    """Makes a fit; the result depends on the attempt alone."""
    _running: dict[Attempt, tuple[int, int]] = field(default_factory=dict)
    """Process ids and the descriptors of their answers."""
    _answers: dict[Attempt, bytes] = field(default_factory=dict)
    """Answers of ended processes; incomplete where one died."""
    _latest_s: float = 0.0
    """Seconds of the latest fit of this process."""

    def fit(self, attempt: Attempt, later: Iterable[Attempt]) -> Fit | Miss:
        """Return the plan of an entry, or why there is none; meanwhile begin the fits that the search is likely to need
        `later`, the most likely first. Fits begun before are dropped if others are likelier or their limits have changed."""
        others = list(later)
        for other in [other for other in self._answers if other[1:] != attempt[1:]]:
            del self._answers[other]
        self._start(attempt, others)
        while attempt in self._running:
            self._collect()
            self._start(attempt, others)
        if (result := self._answered(attempt)) is not None:
            return replace(result, entry=attempt.entry)
        began_s = time.monotonic()
        result = self.work_out(attempt)
        self._latest_s = time.monotonic() - began_s
        return result

    def _start(self, attempt: Attempt, later: Sequence[Attempt]) -> None:
        """Begin the most likely of `later` on cores that are idle while this process fits `attempt` or waits for its fit;
        end all other processes but that of `attempt`."""
        likely = list[Attempt]()
        if sys.platform == "linux" and self._latest_s >= _WORTH_S:
            unanswered = (other for other in later if other not in self._answers)
            likely = list(islice(unanswered, num_more_processes()))
        for other in [other for other in self._running if other != attempt and other not in likely]:
            self._end(other)
        for other in likely:
            if other not in self._running:
                with suppress(OSError):  # no more processes
                    self._running[other] = forked(partial(self._answer, other))

    def close(self) -> None:
        """End all processes."""
        for attempt in list(self._running):
            self._end(attempt)

    def _answer(self, attempt: Attempt, answers: BinaryIO) -> None:
        """Write the result of an attempt, without its candidate, whose stages hold the whole graph."""
        result = self.work_out(attempt)
        pickle.dump(replace(result, candidate=None) if isinstance(result, Miss) else result, answers)

    def _collect(self) -> None:
        """Wait for answers, and store them."""
        ready = select.select([answers for _, answers in self._running.values()], [], [])[0]
        for attempt in [attempt for attempt, (_, answers) in self._running.items() if answers in ready]:
            with open(self._running[attempt][1], "rb", closefd=False) as stream:
                self._answers[attempt] = stream.read()
            self._end(attempt)

    def _answered(self, attempt: Attempt) -> Fit | Miss | None:
        """Return the answer of a process; None if there was no process, or it died."""
        try:
            return pickle.loads(self._answers.pop(attempt, b""))
        except (EOFError, pickle.UnpicklingError):
            return None

    def _end(self, attempt: Attempt) -> None:
        """End a process, whether or not it has an answer; if this is interrupted, `close` does it again."""
        child, answers = self._running[attempt]
        end(child)
        del self._running[attempt]
        os.close(answers)
