"""The process of a rank: how it joins its group, reports failures, and ends."""

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
    error.__name__: error for error in (InputError, PlanError, TraceError)
}
"""Errors of a rank that the launcher passes on with their class, by name: they concern the user's input."""


def start_process() -> None:
    """Set up a process that is only a rank: its launcher handles Ctrl-C, and everything it prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.showwarning = lambda message, *_: _say(f"warning: rank {os.environ['RANK']}: {message}")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """End such a process at once: waiting threads of libraries would abort an interpreter that shuts down normally."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def rank_process(
    kind: str, limits: Limits, rank: int | None = None
) -> Iterator[tuple[Watchdog, torch.device]]:
    """Make this process a monitored rank of the group during the context; an error names the failed rank and its position.

    Args:
        kind: kind of device, ``cpu`` or ``cuda``.
        limits: seconds that a rank may take.
        rank: rank of this process in the plan; None takes the launcher's.

    Yields:
        The watchdog, which must be informed of this rank's position, and the device that it computes on.
    """
    launched, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = launched if rank is None else rank
    meeting = Meeting.joined()
    ends_on = (signal.SIGTERM,) if meeting is not None else (signal.SIGTERM, signal.SIGINT)
    host = None if meeting is not None else hosted_store(limits.start_s)

    def end(message: str) -> None:
        try:
            watch.failed("RunError", message, is_consequence=True)
            # Our launcher reads the board; where it is gone, the first rank prints the message and cleans up.
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
    # The run succeeded for this rank even if another one is lost now, which its launcher reports.
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
    """Remove the run's folder where its launcher no longer can."""
    if meeting is not None and meeting.is_orphaned():
        shutil.rmtree(meeting.folder, ignore_errors=True)


def _joined(watch: Watchdog, kind: str, limits: Limits, meeting: Meeting | None) -> torch.device:
    """Join the group of all ranks and return the device of this process."""
    from stagewright.execution.accelerator import use_expandable_segments
    from stagewright.execution.allocation import keep_freed_memory
    from stagewright.execution.collectives import backend_of, join
    from stagewright.execution.device import local_device

    warning = use_expandable_segments() if kind == "cuda" else None
    if warning is not None and watch.rank == 0:
        _say(f"warning: {warning}")
    target = local_device(kind)
    if kind == "cpu":
        keep_freed_memory()
    if watch.rank == 0 and is_unsealed():
        _say(
            "warning: STAGEWRIGHT_TOKEN is not set, so anyone who reaches this run's rendezvous store can end the run: set "
            "it to the same secret on every host"
        )
    watch.at(JOINING)
    # Our watchdog reports first which rank waits for what; NCCL's would end the process with a C++ trace.
    timeout = timedelta(seconds=1.5 * limits.action_s + CONNECT_S)
    store = group_store(meeting, watch.num_ranks, limits.action_s)
    join(backend_of(kind), store, watch.rank, watch.num_ranks, timeout)
    watch.at("starting")
    return target


def _failure(error: Exception, rank: int, watch: Watchdog) -> StagewrightError:
    """Return this rank's failure and post it: its own error, or the end of another rank that caused it."""
    text = str(error) if isinstance(error, StagewrightError) else f"{type(error).__name__}: {error}"
    position = watch.position
    blamed = watch.blame() if may_be_lost_peer(error) else None
    if blamed is not None:
        failure: StagewrightError = RunError(f"{blamed}; rank {rank} stopped at {position}: {text}")
    else:
        kind = RUN_ERRORS.get(type(error).__name__, RunError)
        failure = kind(f"rank {rank} failed at {position}: {text}")
    watch.failed(type(failure).__name__, str(failure), is_consequence=blamed is not None)
    failure.is_told = Meeting.joined() is not None
    return failure


def may_be_lost_peer(error: BaseException | None) -> bool:
    """Return whether a transfer or a collective may have caused `error`: they raise `RuntimeError`.

    >>> may_be_lost_peer(ValueError("no such token"))
    False
    """
    return any(isinstance(cause, RuntimeError) for cause in causes(error))


def exit_code(work: Callable[[], None]) -> int:
    """Run `work` and return the rank's exit code; print its error unless its launcher does."""
    try:
        work()
    except StagewrightError as error:
        if wants_traceback():
            print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
        if not error.is_told:
            _say(f"stagewright: {printable(str(error))}")
        return 1 if isinstance(error, RunError) else 2
    return 0
