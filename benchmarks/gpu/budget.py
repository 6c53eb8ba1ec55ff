"""Parts of a campaign in a limited time: each has its share, its most telling cases come first, and what fails or finds no
time is told."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Row = tuple[str, list[float], float]
"""What, as every description predicts it (none where nothing does), measured: seconds and bytes."""


@dataclass(frozen=True)
class Case:
    """`measure` yields rows and notes."""

    name: str
    measure: Callable[[], Iterator[Row | str]]


@dataclass(frozen=True)
class Part:
    """Cases, the most telling first, and how much of the time they get beside other parts."""

    name: str
    share: float
    cases: Sequence[Case]


@dataclass
class Section:
    """What came of a part."""

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Cases for which there was no time, and those that it ended."""
    seconds: float = 0.0
    longest_s: float = 0.0
    """Of a case."""


class TimeUp(BaseException):
    """No `Exception`: whoever catches all of those goes on, and a case whose time is up must not."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeUp` inside after so long, again each second; not in threads, which no signal reaches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise TimeUp(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def measured(
    parts: Sequence[Part],
    seconds: float,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Section]], None] = lambda sections: None,
) -> list[Section]:
    """Sections of all parts, in `seconds`. What a part leaves of its share goes to those behind it, and what is left in the
    end to cases that found no time. `keep` is given the sections whenever a part is done."""
    end = time.monotonic() + seconds
    sections = [Section(part.name) for part in parts]
    for index, part in enumerate(parts):
        now, shares = time.monotonic(), sum(other.share for other in parts[index:])
        _measure(sections[index], part.cases, now + (end - now) * part.share / shares, tell)
        keep(sections)
    for section, part in zip(sections, parts, strict=True):
        if section.left_out:
            again = [case for case in part.cases if case.name in section.left_out]
            section.left_out = [name for name in section.left_out if name not in {one.name for one in again}]
            _measure(section, again, end, tell)
            keep(sections)
    return sections


def _measure(section: Section, cases: Sequence[Case], end: float, tell: Callable[[str], None]) -> None:
    """Case after case until `end`; none is begun that has less than half of the time that the longest took."""
    begun = time.monotonic()
    for case in cases:
        start = time.monotonic()
        left = end - start
        if left <= section.longest_s / 2:
            section.left_out.append(case.name)
            continue
        size = len(section.rows)
        try:
            with time_limit(left):
                for item in case.measure():
                    section.notes.append(item) if isinstance(item, str) else section.rows.append(item)
            told = f"{len(section.rows) - size} rows"
        except TimeUp:
            told = f"ended after {time.monotonic() - start:.0f} s for want of time, {len(section.rows) - size} rows"
            section.left_out.append(f"{case.name} ({told})")
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            section.errors.append(f"{case.name}: {told}")
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
        section.longest_s = max(section.longest_s, time.monotonic() - start)
        tell(f"{section.name}: {case.name}: {told}, {time.monotonic() - start:.0f} s")
    section.seconds += time.monotonic() - begun
