"""A process that is one rank of a group: how it joins, what it says when it fails, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from stagewright.errors import (
    InputError,
    PlanError,
    RunError,
    StagewrightError,
    TraceError,
    causes,
    wants_traceback,
)
from stagewright.execution.rendezvous import Meeting, board_of, group_store, hosted_store, is_unsealed
from stagewright.execution.watchdog import CONNECT_S, IMPORT_SILENCE_S, JOINING, Limits, Watchdog
from stagewright.text import printable

if TYPE_CHECKING:
    import torch

RUN_ERRORS: dict[str, type[StagewrightError]] = {
    one.__name__: one for one in (InputError, PlanError, TraceError)
}
"""Of a rank's errors those that the launcher passes on as they are, by name: what the user gave cannot be used."""


def start_process() -> None:
    """For a process that is nothing but a rank: Ctrl-C is its launcher's to answer, and nothing it prints is on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.showwarning = lambda message, *_: _say(f"warning: rank {os.environ['RANK']}: {message}")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """End such a process at once: threads of libraries that still wait would abort an interpreter that takes itself down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def rank_process(
    kind: str, limits: Limits, rank: int | None = None
) -> Iterator[tuple[Watchdog, torch.device]]:
    """Inside, this process is a rank of the group and watched; an error says which rank failed at what.

    Args:
        kind: of device, ``cpu`` or ``cuda``.
        limits: seconds a rank may take.
        rank: of this process in the plan; that of the launcher where they are the same.

    Yields:
        The watch, which is to be told where this rank stands, and the device it computes on.
    """
    launched, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = launched if rank is None else rank
    meeting = Meeting.joined()
    ends_on = (signal.SIGTERM,) if meeting is not None else (signal.SIGTERM, signal.SIGINT)
    host = None if meeting is not None else hosted_store(limits.start_s)

    def end(message: str) -> None:
        try:
            watch.failed("RunError", message, is_consequence=True)
            # A launcher of ours reads the board; where it is gone, the first rank has the last word, and clears up.
            if meeting is None or (meeting.is_orphaned() and rank == 0):
                _say(f"stagewright: {printable(message)}")
            _clear_up(meeting)
        finally:
            os._exit(1)

    launcher = None if meeting is None else meeting.launcher
    watch = Watchdog(rank, world, board_of(meeting, world, limits.start_s), limits, end, launcher)
    watch.listen_for_signals(*ends_on)
    watch.start()
    try:
        watch.at("importing torch", max(IMPORT_SILENCE_S, limits.start_s))
        target = _joined(watch, kind, limits, meeting)
        yield watch, target
    except Exception as error:
        failure = _failure(error, rank, watch)
        if meeting is None and world == 1:  # nobody else ends with it, so this process may go on
            _leave(watch)
        raise failure from error
    # The run ended well, for this rank also if another one is lost now: its launcher says so.
    import torch.distributed as dist

    watch.stop()
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()
    _clear_up(meeting)
    del host


def _leave(watch: Watchdog) -> None:
    import torch.distributed as dist

    watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def _clear_up(meeting: Meeting | None) -> None:
    """Removes the run's folder where its launcher no longer can."""
    if meeting is not None and meeting.is_orphaned():
        shutil.rmtree(meeting.folder, ignore_errors=True)


def _joined(watch: Watchdog, kind: str, limits: Limits, meeting: Meeting | None) -> torch.device:
    """The device of this process, which has joined the group of all ranks."""
    from stagewright.execution.allocation import keep_freed_memory
    from stagewright.execution.collectives import backend_of, join
    from stagewright.execution.device import local_device

    target = local_device(kind)
    if kind == "cpu":
        keep_freed_memory()
    if watch.rank == 0 and is_unsealed():
        _say(
            "warning: STAGEWRIGHT_TOKEN is not set, so whoever reaches this run's rendezvous store can end the run: set it "
            "to the same secret on every host"
        )
    watch.at(JOINING)
    # The watch says first which rank waits for what; NCCL's own watchdog would end the process with a trace of C++.
    timeout = timedelta(seconds=1.5 * limits.action_s + CONNECT_S)
    store = group_store(meeting, watch.num_ranks, limits.action_s)
    join(backend_of(kind), store, watch.rank, watch.num_ranks, timeout)
    watch.at("starting")
    return target


def _failure(error: Exception, rank: int, watch: Watchdog) -> StagewrightError:
    """What this rank says, to the others too: its own error, or which other rank's end caused it."""
    own = str(error) if isinstance(error, StagewrightError) else f"{type(error).__name__}: {error}"
    position = watch.position
    blamed = watch.blame() if may_be_lost_peer(error) else None
    if blamed is not None:
        found: StagewrightError = RunError(f"{blamed}; rank {rank} stopped at {position}: {own}")
    else:
        kind = RUN_ERRORS.get(type(error).__name__, RunError)
        found = kind(f"rank {rank} failed at {position}: {own}")
    watch.failed(type(found).__name__, str(found), is_consequence=blamed is not None)
    found.is_told = Meeting.joined() is not None
    return found


def may_be_lost_peer(error: BaseException | None) -> bool:
    """Whether a transfer or a collective may be behind `error`: they raise `RuntimeError`.

    >>> may_be_lost_peer(ValueError("no such token"))
    False
    """
    return any(isinstance(each, RuntimeError) for each in causes(error))


def exit_code(work: Callable[[], None]) -> int:
    """Of a rank that does `work`; prints its error unless its launcher does."""
    try:
        work()
    except StagewrightError as error:
        if wants_traceback():
            print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
        if not error.is_told:
            _say(f"stagewright: {printable(str(error))}")
        return 1 if isinstance(error, RunError) else 2
    return 0
