"""The processes of a run on this machine: started, watched over, asked to stop, and ended whatever happens.

No port is opened for them: they find each other through a private folder, and the launcher reads what they post there.
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
"""What the other ranks are given to say why they end, once one of them has."""
_STOPPED_FOR_S = 10.0
"""Seconds after which a process that somebody has stopped (SIGSTOP) is taken for lost."""
_STOPS = (signal.SIGINT, signal.SIGTERM)


def start_ranks(
    module: str,
    arguments: Sequence[str],
    ranks: Sequence[int],
    start_s: float = 300.0,
    can_stop: bool = False,
) -> None:
    """Run ``python -m module *arguments`` once per rank and wait for all.

    Ctrl-C or SIGTERM ends all of them at once; with `can_stop` it first asks those that train to stop behind the present
    step, and this returns when they have.

    Args:
        ranks: the rank of the process on each device.
        start_s: seconds in which every rank has to give a sign of life.

    Raises:
        InputError, PlanError: a rank found that what the user gave cannot be used.
        RunError: a rank failed; says which, where it stood, and why.
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
    """Signals that came since, in order; where this is not the main thread none is noted."""
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
    """One per rank, each leading a process group, so that what it starts ends with it; none is left behind."""
    found: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for place, rank in enumerate(ranks):
            found[rank] = started(module, arguments, _environment(meeting, place, len(ranks)))
        yield found
    finally:
        _signal(found.values(), signal.SIGKILL)
        for process in found.values():
            process.kill()
            process.wait()


def started(module: str, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """``python -m module *arguments``, leading a process group."""
    command = python_command(module, *arguments)
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """To all that the processes have started too."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _environment(meeting: Meeting, place: int, num_processes: int) -> dict[str, str]:
    """Of the process on device `place`; threads share the cores where nobody has said otherwise."""
    threads = max((os.cpu_count() or 1) // num_processes, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(place),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        **meeting.environment(),
    }


class _Watchman:
    """Waits for the processes of `processes`, by rank, and says why one of them ended."""

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
        """Until all have ended."""
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
        trains = any(post.num_steps is not None for post in self._liveness.posts.values())
        if self._can_stop and trains and not self._is_stopping:
            self._is_stopping = True
            self._board.write(LAUNCHER, received.name)
            print("stopping behind this step; once more ends it at once", file=sys.stderr, flush=True)
            return
        trained = "in the middle of a step" if trains else "before the first step: nothing was trained"
        print(f"ended by {received.name} {trained}", file=sys.stderr, flush=True)
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received)

    def _pause(self) -> None:
        """Ctrl-Z halts the ranks too; `fg` lets all go on."""
        _signal(self._processes.values(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal(self._processes.values(), signal.SIGCONT)

    # -- what went wrong --------------------------------------------------------------------------------------------

    def _unseen(self, passed_s: float) -> str | None:
        """Which rank has not posted in time, or is halted by somebody."""
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
                    "started: the machine is too busy, or give it longer with --start-timeout"
                )
        return None

    def _has_failed(self) -> bool:
        """Whether a process ended badly, or its rank says that it is about to."""
        ended = any(process.poll() for process in self._processes.values())
        return ended or any(post.failure is not None for post in self._liveness.posts.values())

    def _explained(self) -> StagewrightError:
        """Why the first rank failed: in its own words, or how it ended where it could say nothing."""
        deadline = time.monotonic() + _SETTLE_S
        while not self._is_clear() and time.monotonic() < deadline:
            time.sleep(_INTERVAL_S)
            self._liveness.look(self._processes)
        self._liveness.look(self._processes)
        posts = self._liveness.posts
        words = [post.failure for post in posts.values() if post.failure is not None]
        words.sort(key=lambda failure: (failure.is_consequence, failure.time))
        codes = {rank: process.poll() or 0 for rank, process in self._processes.items()}
        failed = sorted(filter(codes.get, codes), key=codes.__getitem__)  # those that a signal ended first
        silent = [rank for rank in failed if rank not in posts or posts[rank].failure is None]
        if silent and (not words or words[0].is_consequence):
            rank = silent[0]
            process = self._processes[rank]
            told = f": {words[0].message}" if words else self._liveness.others(f"rank {rank} ")
            text = f"rank {rank} (process {process.pid}) ended with {_ending(process.returncode)} at {self._position(rank)}"
            error = RunError(f"the run stopped: {printable(text + told)}")
            error.lost = tuple(rank for rank in silent if codes[rank] == -signal.SIGKILL)
            return error
        kind = RunError if words[0].is_consequence else RUN_ERRORS.get(words[0].kind, RunError)
        return kind(f"the run stopped: {printable(words[0].message)}")

    def _is_clear(self) -> bool:
        """Whether nothing that is still to come could say more: all have ended, one was killed, or one has said why."""
        states = [process.poll() for process in self._processes.values()]
        said = [post.failure for post in self._liveness.posts.values() if post.failure is not None]
        return (
            None not in states
            or any(code is not None and code < 0 for code in states)
            or any(not failure.is_consequence for failure in said)
        )

    def _position(self, rank: int) -> str:
        post = self._liveness.posts.get(rank)
        position = "the start" if post is None else post.position
        return "the end" if position == FINISHED else position


def _is_halted(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where the system does not tell."""
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
            "SIGKILL (if nobody sent it, the system had run out of memory: its log says so; then plan with a smaller "
            "--memory-limit, or run fewer ranks here)"
        )
    return signal.Signals(-code).name
