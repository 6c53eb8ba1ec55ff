"""Cores and memory of this machine, its garbage collector, and work in several processes."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_PROCESSES = 8
_ALLOCATIONS = 200_000
"""Allocations between garbage collections that run seldom."""
_COPY_BYTES = 2**30
"""Memory of a copy of this process in bytes beyond what it shares with this one, estimated generously."""
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
    if 0 < before[0] < _ALLOCATIONS:
        collect_seldom()
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


@contextmanager
def _answering(shares: Iterable[Sequence[Callable[[], object]]]) -> Iterator[list[BinaryIO]]:
    """Let processes that start as copies of this one do a share of the work each; yield the streams of their answers, fewer
    than shares if no more processes could be started. They end with the context."""

    def answer(share: Sequence[Callable[[], object]], answers: BinaryIO) -> None:
        for work in share:
            pickle.dump(work(), answers)
            answers.flush()

    children = list[tuple[int, BinaryIO]]()
    try:
        with suppress(OSError):  # no more processes
            for share in shares:
                child, reader = forked(partial(answer, share))
                children.append((child, os.fdopen(reader, "rb")))
        yield [answers for _, answers in children]
    finally:
        for child, answers in children:
            answers.close()
            end(child)


def worked_out(
    work: Callable[[Item], Result], items: Sequence[Item], num_processes: int
) -> Generator[Result | None]:
    """Yield `work` of all items, in order, from `num_processes` copies of this process, which get blocks of items in turn;
    None for the items of a process that could not be started, and for the remaining ones of a process that died."""
    shares: list[list[Callable[[], Result]]] = [[] for _ in range(num_processes)]
    for place, item in enumerate(items):
        shares[place // _BLOCK % num_processes].append(partial(work, item))
    with _answering(shares) as answers:
        for place in range(len(items)):
            process = place // _BLOCK % num_processes
            try:
                result = pickle.load(answers[process]) if process < len(answers) else None
            except (EOFError, pickle.UnpicklingError):
                result = None
            yield result


def at_once(works: Sequence[Callable[[], Result]]) -> Generator[Result]:
    """Yield the results of `works`, in order. This process does some of them, the first among them; copies of it do the
    others at the same time, as many as the machine has cores and memory for."""
    num_more = min(len(works) - 1, num_more_processes()) if sys.platform == "linux" else 0
    num_processes = 1 + max(0, num_more)
    with _answering(works[first::num_processes] for first in range(1, num_processes)) as answers:
        for place, work in enumerate(works):
            process = place % num_processes  # 0: this one
            try:
                result = pickle.load(answers[process - 1]) if 0 < process <= len(answers) else work()
            except (EOFError, pickle.UnpicklingError):  # of a process that died
                result = work()
            yield result


def end(child: int) -> None:
    """End a process that `forked` started, and wait for it, unless it has been waited for already."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def num_more_processes(num_bytes: float = _COPY_BYTES) -> int:
    """Return the number of further processes of `num_bytes` each that the machine has cores and memory for."""
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
