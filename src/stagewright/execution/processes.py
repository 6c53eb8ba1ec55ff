"""The processes of a run on this machine: starting, monitoring, stopping and ending them.

No port is opened for them: they find each other through a private folder, and the launcher reads their posts there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stagewright.errors import RunError, StagewrightError
from stagewright.execution.folder_lock import run_folder
from stagewright.execution.heartbeat import FINISHED, LAUNCHER, FileBoard, Liveness
from stagewright.execution.rank_process import RUN_ERRORS
from stagewright.execution.rendezvous import Meeting
from stagewright.machine import python_command
from stagewright.text import printable

_INTERVAL_S = 0.2
_SETTLE_S = 3.0
"""Seconds in which the other ranks may post why they end, once one of them has ended."""
_STOPPED_FOR_S = 10.0
"""Seconds after which a process that was stopped from outside (SIGSTOP) counts as lost."""
_STOPS = (signal.SIGINT, signal.SIGTERM)


def start_ranks(
    module: str,
    arguments: Sequence[str],
    ranks: Sequence[int],
    start_s: float = 300.0,
    can_stop: bool = False,
) -> None:
    """Run ``python -m module *arguments`` once per rank and wait for all.

    Ctrl-C or SIGTERM ends all of them at once; with `can_stop` it first asks training ranks to stop after the present step,
    and this function returns when they have.

    Args:
        ranks: rank of the process on each device.
        start_s: seconds within which every rank has to post.

    Raises:
        InputError, PlanError: a rank cannot use the user's input.
        RunError: a rank failed; names the rank, its position and the reason.
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
        SystemExit: SIGTERM; all ranks have been ended.
    """
    with (
        _noted_signals() as received,
        run_folder() as folder,
        _processes(meeting := Meeting.new(folder), module, arguments, ranks) as processes,
    ):
        _Watchman(meeting.board(len(ranks)), processes, start_s, can_stop).wait(received)


@contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Record received signals, in order, during the context; none outside the main thread."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (*_STOPS, signal.SIGTSTP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _processes(
    meeting: Meeting, module: str, arguments: Sequence[str], ranks: Sequence[int]
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Start a process per rank, each leading a process group, so that children end with it; none outlives the context."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for place, rank in enumerate(ranks):
            processes[rank] = started(module, arguments, _environment(meeting, place, len(ranks)))
        yield processes
    finally:
        _signal(processes.values(), signal.SIGKILL)
        for process in processes.values():
            process.kill()
            process.wait()


def started(module: str, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``python -m module *arguments`` as the leader of a process group."""
    command = python_command(module, *arguments)
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to the process groups of `processes`."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _environment(meeting: Meeting, place: int, num_processes: int) -> dict[str, str]:
    """Return the environment of the process on device `place`; cores are divided among processes unless the user chose."""
    threads = max((os.cpu_count() or 1) // num_processes, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of every communicator of two ranks, which are what lanes are
        **os.environ,
        "RANK": str(place),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        **meeting.environment(),
    }


class _Watchman:
    """A monitor that waits for `processes`, by rank, and reports why one of them ended."""

    def __init__(
        self, board: FileBoard, processes: dict[int, subprocess.Popen[bytes]], start_s: float, can_stop: bool
    ) -> None:
        self._board = board
        self._processes = processes
        self._start_s = start_s
        self._can_stop = can_stop
        self._liveness = Liveness(board, _INTERVAL_S)
        self._is_stopping = False
        self._ran_s = 0.0
        self._halted_s = dict.fromkeys(processes, 0.0)

    def wait(self, received: list[signal.Signals]) -> None:
        """Wait until all processes have ended. Raises as `start_ranks`."""
        looked = time.monotonic()
        while any(process.poll() is None for process in self._processes.values()):
            time.sleep(_INTERVAL_S)
            missed = self._liveness.look(self._processes)
            now = time.monotonic()
            passed, looked = now - looked - missed, now
            while received:
                self._answer(received.pop(0))
            if self._has_failed():
                raise self._explained()
            if problem := self._liveness.problem() or self._unseen(passed):
                raise RunError(f"the run stopped: {printable(problem + self._liveness.others(problem))}")
        if self._has_failed():
            raise self._explained()

    # -- signals ----------------------------------------------------------------------------------------------------

    def _answer(self, received: signal.Signals) -> None:
        if received == signal.SIGTSTP:
            self._pause()
            return
        self._liveness.look(self._processes)  # ranks may have begun to train since the last look
        trains = any(post.num_steps is not None for post in self._liveness.posts.values())
        if self._can_stop and trains and not self._is_stopping:
            self._is_stopping = True
            self._board.write(LAUNCHER, received.name)
            print(
                "stopping after this step; a second signal ends the run at once", file=sys.stderr, flush=True
            )
            return
        trained = "in the middle of a step" if trains else "before the first step: nothing was trained"
        print(f"ended by {received.name} {trained}", file=sys.stderr, flush=True)
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received)

    def _pause(self) -> None:
        """Stop this process and the ranks (Ctrl-Z), until `fg` continues all of them."""
        _signal(self._processes.values(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal(self._processes.values(), signal.SIGCONT)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _unseen(self, passed_s: float) -> str | None:
        """Return which rank has not posted in time or is stopped from outside, or None."""
        self._ran_s += passed_s
        for rank, process in self._processes.items():
            self._halted_s[rank] = self._halted_s[rank] + passed_s if _is_halted(process.pid) else 0.0
            if self._halted_s[rank] > _STOPPED_FOR_S:
                return (
                    f"rank {rank} froze at {self._position(rank)}: its process ({process.pid}) was stopped from outside "
                    f"(SIGSTOP) {self._halted_s[rank]:.0f} s ago"
                )
            if rank not in self._liveness.posts and self._ran_s > self._start_s:
                return (
                    f"rank {rank} (process {process.pid}) gave no sign of life in the {self._ran_s:.0f} s since it was "
                    "started: the machine is too busy; allow more time with --start-timeout"
                )
        return None

    def _has_failed(self) -> bool:
        """Return whether a process ended with an error, or its rank posted a failure."""
        ended = any(process.poll() for process in self._processes.values())
        return ended or any(post.failure is not None for post in self._liveness.posts.values())

    def _explained(self) -> StagewrightError:
        """Return the error of the first failed rank: its own message, or how it ended if it posted none."""
        deadline = time.monotonic() + _SETTLE_S
        while not self._is_clear() and time.monotonic() < deadline:
            time.sleep(_INTERVAL_S)
            self._liveness.look(self._processes)
        self._liveness.look(self._processes)
        posts = self._liveness.posts
        failures = [post.failure for post in posts.values() if post.failure is not None]
        failures.sort(key=lambda failure: (failure.is_consequence, failure.time))
        codes = {rank: process.poll() or 0 for rank, process in self._processes.items()}
        failed = sorted(filter(codes.get, codes), key=codes.__getitem__)  # those ended by a signal come first
        silent = [rank for rank in failed if rank not in posts or posts[rank].failure is None]
        if silent and (not failures or failures[0].is_consequence):
            rank = silent[0]
            process = self._processes[rank]
            detail = f": {failures[0].message}" if failures else self._liveness.others(f"rank {rank} ")
            text = f"rank {rank} (process {process.pid}) ended with {_ending(process.returncode)} at {self._position(rank)}"
            error = RunError(f"the run stopped: {printable(text + detail)}")
            error.lost = tuple(rank for rank in silent if codes[rank] == -signal.SIGKILL)
            return error
        kind = RunError if failures[0].is_consequence else RUN_ERRORS.get(failures[0].kind, RunError)
        return kind(f"the run stopped: {printable(failures[0].message)}")

    def _is_clear(self) -> bool:
        """Return whether the reason is final: all processes have ended, one was killed, or one has posted its failure."""
        states = [process.poll() for process in self._processes.values()]
        failures = [post.failure for post in self._liveness.posts.values() if post.failure is not None]
        return (
            None not in states
            or any(code is not None and code < 0 for code in states)
            or any(not failure.is_consequence for failure in failures)
        )

    def _position(self, rank: int) -> str:
        post = self._liveness.posts.get(rank)
        position = "the start" if post is None else post.position
        return "the end" if position == FINISHED else position


def _is_halted(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where the system does not report it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _ending(code: int) -> str:
    """
    >>> _ending(3), _ending(-11)
    ('exit code 3', 'SIGSEGV')
    """
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGKILL:
        return (
            "SIGKILL (if nobody sent it, the system ran out of memory, which its log shows: plan with a smaller "
            "--memory-limit, or run fewer ranks here)"
        )
    return signal.Signals(-code).name
