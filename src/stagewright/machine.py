"""Cores and memory of this machine, and further processes on it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_PROCESSES = 8
_ALLOCATIONS = 200_000
_BLOCK = 4
"""Number of neighbouring items that one process gets: they often have much in common."""


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect_seldom() -> None:
    """Let the garbage collector run seldom from now on: libraries and graphs are many objects without cycles, and each
    collection scans them all."""
    gc.set_threshold(_ALLOCATIONS)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Let the garbage collector run seldom inside."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _ALLOCATIONS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the garbage collector inside: for what creates many objects and few cycles within seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `module`. It imports nothing from the current folder (``-P``), where a file
    may have the name of a library."""
    return [sys.executable, "-P", "-m", module, *arguments]


def forked(work: Callable[[BinaryIO], None]) -> tuple[int, int]:
    """Run `work` in a child process that starts as a copy of this one; return the child's id and the descriptor of what it
    writes. The child uses no other thread and ends without cleaning up."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of processes with threads
        try:
            child = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
    if child:
        os.close(writer)
        return child, reader
    try:
        os.close(reader)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()  # finalizers of the parent's unused objects may wait for threads that do not exist here
        with os.fdopen(writer, "wb") as stream:
            work(stream)
    finally:
        os._exit(0)


def worked_out(
    work: Callable[[Item], Result], items: Sequence[Item], num_processes: int
) -> Iterator[Result | None]:
    """Yield `work` of all items, in order, from so many processes, which start as copies of this one and get blocks of items
    in turn; None for what a process did not get to because it died or could not be started."""

    def answer(first: int, stream: BinaryIO) -> None:
        for start in range(first * _BLOCK, len(items), num_processes * _BLOCK):
            for item in items[start : start + _BLOCK]:
                pickle.dump(work(item), stream)
                stream.flush()

    children = list[tuple[int, BinaryIO]]()
    try:
        with suppress(OSError):  # no more processes
            for first in range(num_processes):
                child, answers = forked(partial(answer, first))
                children.append((child, os.fdopen(answers, "rb")))
        for place in range(len(items)):
            number = place // _BLOCK % num_processes
            try:
                yield pickle.load(children[number][1]) if number < len(children) else None
            except (EOFError, pickle.UnpicklingError):
                yield None
    finally:
        for child, stream in children:
            stream.close()
            end(child)


def at_once(works: Sequence[Callable[[], Result]], num_bytes: float) -> Generator[Result]:
    """Yield the results of `works`, in order: of some from this process, the first among them, and of the others meanwhile
    from processes of `num_bytes`, which start as copies of this one, as far as the machine has cores and memory for them."""
    num_more = min(len(works) - 1, num_more_processes(num_bytes)) if sys.platform == "linux" else 0
    num_processes = 1 + max(0, num_more)
    children = list[tuple[int, BinaryIO]]()
    try:
        with suppress(OSError):  # no more processes
            for first in range(1, num_processes):
                child, answers = forked(partial(_answer, works[first::num_processes]))
                children.append((child, os.fdopen(answers, "rb")))
        for place, work in enumerate(works):
            number = place % num_processes
            try:
                yield pickle.load(children[number - 1][1]) if 0 < number <= len(children) else work()
            except (EOFError, pickle.UnpicklingError):  # of a process that died
                yield work()
    finally:
        for child, stream in children:
            stream.close()
            end(child)


def _answer(works: Sequence[Callable[[], object]], answers: BinaryIO) -> None:
    for work in works:
        pickle.dump(work(), answers)
        answers.flush()


def end(child: int) -> None:
    """End a process that `forked` started, and wait for it, unless it has been waited for already."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def num_more_processes(num_bytes: float) -> int:
    """Return the number of further processes of so many bytes that the machine has cores and memory for."""
    return min(num_cores() - 1, int(min(free_bytes() / num_bytes, _MOST_PROCESSES)))


def machine_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container if it may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_bytes() -> float:
    """Return the bytes of memory that are free or cache files; infinity if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    amounts = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((1024.0 * int(words[1]) for words in amounts), float("inf"))
