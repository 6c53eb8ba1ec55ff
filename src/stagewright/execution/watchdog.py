"""The watchdog of a rank: it posts the rank's position, and detects and reports ranks that are gone.

Every rank posts its position a few times a second. A rank whose post no longer changes is dead or frozen; the others report
that, with its last action and their own, and stop. Nothing here imports torch: the watchdog starts before that.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stagewright.errors import RunError
from stagewright.execution.heartbeat import (
    FINISHED,
    LAUNCHER,
    SILENCE_S,
    Board,
    Failure,
    Liveness,
    Post,
    write_post,
)

INTERVAL_S = 0.25
"""Seconds between two posts of a rank."""
IMPORT_SILENCE_S = 30.0
"""Seconds for which loading libraries may block all Python threads; `Limits.start_s` applies where it is larger."""
JOINING = "joining the group"
CONNECT_S = 60.0
"""Seconds within which ranks that have all arrived must connect."""
_LOOK_EVERY_S = 5.0
Report = Callable[..., None]
"""A callable with the arguments of `Watchdog.at`."""
_SETTLE_S = 1.5
_BLAME_WITHIN_S = 8.0
_NUM_NEIGHBOURS = 8
"""Number of ranks that each rank monitors permanently; all are examined when something has gone wrong."""


@dataclass(frozen=True)
class Limits:
    """Time limits of a rank in seconds: for one action once it trains, and until all ranks have joined the group. Work
    before the first step, such as tracing, may take the larger of the two."""

    action_s: float = 1800.0
    start_s: float = 300.0


@contextmanager
def connecting(ranks: Sequence[int], watch: Report) -> Iterator[None]:
    """Report that the backend connects `ranks` during the context, and name them in an error."""
    watch(f"connecting {ranks_text(ranks)}", meets=ranks)
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{ranks_text(ranks)} cannot reach each other ({reason}): {CONNECTION_REMEDY}"
        ) from error


CONNECTION_REMEDY = (
    "check that the interface named by NCCL_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) connects their hosts, that no firewall is "
    "between them, and what NCCL_DEBUG=INFO prints"
)


def ranks_text(ranks: Sequence[int]) -> str:
    """
    >>> ranks_text([3, 4]), ranks_text(range(16)), ranks_text([0])
    ('ranks 3 and 4', '16 ranks from 0 to 15', 'rank 0')
    """
    if len(ranks) > _NUM_NEIGHBOURS:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    *first_ranks, last = map(str, ranks)
    return f"ranks {', '.join(first_ranks)} and {last}" if first_ranks else f"rank {last}"


class Watchdog:
    """A thread that posts this rank's position and monitors those of the others.

    Args:
        limits: limits beyond which a rank ends the run.
        on_failure: called with the message when this process has to end.
        launcher: id of the process that started this one and without which it ends; None under a foreign launcher.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        board: Board,
        limits: Limits,
        on_failure: Callable[[str], None],
        launcher: int | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_steps: int | None = None
        self.stop_asked: str | None = None
        """Name of the signal by which the run was asked to stop after the present step."""
        self._board = board
        self._limits = limits
        self._on_failure = on_failure
        self._launcher = launcher
        self.position, self._silence_s = "starting", max(IMPORT_SILENCE_S, limits.start_s)
        self._since = time.monotonic()
        self._meets: Sequence[int] = ()
        self._looked_s = self._all_there_s = 0.0
        self.device_position: Callable[[], str] = lambda: ""
        """Position of an asynchronous device, which may be behind its host's."""
        self._beat = 0
        self._failure: Failure | None = None
        self._restore: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._failing = threading.Lock()
        self._posting = threading.RLock()  # a post that fails ends in another
        self._liveness = Liveness(board, INTERVAL_S)
        self._thread = threading.Thread(target=self._run, daemon=True, name="stagewright-watch")

    def start(self) -> None:
        self._post()
        self._thread.start()

    def at(self, position: str, silence_s: float = SILENCE_S, meets: Sequence[int] = ()) -> None:
        """Set this rank's `position` (the text of an action), where it may be silent for `silence_s`. All ranks that it
        `meets` there connect, and must proceed together within `CONNECT_S`."""
        self.position, self._silence_s, self._meets = position, silence_s, meets
        self._since = time.monotonic()
        self._looked_s = self._all_there_s = 0.0

    def begin_steps(self, num_steps: int) -> None:
        """Post at once that this rank is about to train, after `num_steps` done: from here on a signal lets a step end."""
        self.num_steps = num_steps
        self._post()

    def stop(self) -> None:
        """Stop monitoring after a successful run: positions no longer matter."""
        self.position = FINISHED
        self._stopped.set()
        self._restore()
        self._restore = lambda: None
        if (
            self._thread.is_alive()
        ):  # a thread inside a call of the store at the end of the interpreter would abort the process
            self._thread.join(SILENCE_S)
        self._post()

    def listen_for_signals(self, *signals: signal.Signals) -> None:
        """Handle `signals` until `stop`, even while blocked in a transfer: report another rank that is gone, or else stop
        after the present step. A second signal ends the process at once.

        The thread that the system interrupts, whichever it is, writes the signal's number to a pipe. Outside the main thread
        this does nothing: Python allows handlers only there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = {number: signal.signal(number, lambda *_: None) for number in signals}
        woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def wait() -> None:
            received = os.read(read, 1)
            if received:
                threading.Thread(target=self._judge, args=(signal.Signals(received[0]),), daemon=True).start()
                if second := os.read(read, 1):
                    os._exit(128 + second[0])
            os.close(read)

        thread = threading.Thread(target=wait, daemon=True, name="stagewright-signals")
        thread.start()

        def restore() -> None:
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(woken)
                for number, handler in before.items():
                    signal.signal(number, handler)
            os.close(write)  # which ends the thread

        self._restore = restore

    def stopped_by(self) -> str:
        """Return the name of the signal that asked this rank or another to stop the run."""
        self._look_for_launcher()
        return self.stop_asked or signal.SIGTERM.name

    def failed(self, kind: str, message: str, is_consequence: bool = False) -> None:
        """Post the error with which this rank is about to end, for the others and the launcher. The first error stays: later
        ones are consequences of the others' ends and must not count as the cause."""
        if self._failure is None:
            self._failure = Failure(kind, message, time.time(), is_consequence)
            self._post()

    def blame(self) -> str | None:
        """Return which rank is gone, and its position, within a few seconds; None once all others have shown to be alive."""
        liveness = Liveness(self._board, INTERVAL_S)
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        liveness.look(peers)
        before = {rank: post.beat for rank, post in liveness.posts.items()}
        deadline = time.monotonic() + _BLAME_WITHIN_S
        while time.monotonic() < deadline:
            time.sleep(INTERVAL_S)
            deadline += liveness.look(peers)
            if problem := liveness.problem(_SETTLE_S):
                return problem
            for rank, post in liveness.posts.items():
                before.setdefault(rank, post.beat)
            # One later beat may have been in flight when its rank died; a second was sent by a living one.
            if len(before) == len(peers) and all(
                liveness.posts[rank].beat >= beat + 2 or liveness.posts[rank].position == FINISHED
                for rank, beat in before.items()
            ):
                return None
        unseen = [rank for rank in peers if rank not in before]
        return f"rank {unseen[0]} died or froze at the start (it gave no sign of life)" if unseen else None

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        neighbours = [
            (self.rank + distance) % self.num_ranks
            for distance in range(1, min(_NUM_NEIGHBOURS + 1, self.num_ranks))
        ]
        while not self._stopped.wait(INTERVAL_S):
            self._post()
            self._since += self._liveness.look(neighbours)
            self._look_for_launcher()
            if problem := self._liveness.problem() or self._own_problem():
                self._fail(problem)
                return

    def _post(self) -> None:
        with self._posting:
            self._beat += 1
            post = Post(self._beat, self.position, self.num_steps, self._silence_s, self._failure)
            try:
                write_post(self._board, self.rank, post)
            except (OSError, RuntimeError):  # torch's DistError is a RuntimeError
                if not self._stopped.is_set():
                    self._fail("the rendezvous store is gone: the process that hosts it has ended")

    def _look_for_launcher(self) -> None:
        if self._launcher is None:
            return
        if os.getppid() != self._launcher:
            self._fail(f"the process that started the run ({self._launcher}) has ended")
        self.stop_asked = self.stop_asked or self._board.read(LAUNCHER)

    def _own_problem(self) -> str | None:
        waited = time.monotonic() - self._since
        if self.position == JOINING and waited > self._limits.start_s:
            everyone = Liveness(self._board, INTERVAL_S)
            everyone.look(range(self.num_ranks))
            unseen = set(range(self.num_ranks)) - everyone.posts.keys()
            missing = [f"rank {rank} gave no sign of life" for rank in sorted(unseen)]
            missing += [
                f"rank {rank} is still at '{post.position}'"
                for rank, post in sorted(everyone.posts.items())
                if post.position != JOINING
            ]
            return f"not all ranks joined within {waited:.0f} s: {', '.join(missing) or 'the network lets none connect'}"
        if self._meets and self._cannot_connect(waited):
            return (
                f"{ranks_text(self._meets)} have not connected within {CONNECT_S:.0f} s: {CONNECTION_REMEDY}"
            )
        if self.num_steps is None and waited > max(self._limits.action_s, self._limits.start_s):
            return (
                f"this rank has been at {self.position} for {waited:.0f} s before its first step: the machine is too busy; "
                "allow more time with --start-timeout"
            )
        if self.num_steps is not None and waited > self._limits.action_s:
            return f"this rank has been at {self.position} for {waited:.0f} s, longer than the limit of an action"
        return None

    def _cannot_connect(self, waited: float) -> bool:
        """Return whether all ranks that this one meets have been at its position for too long; only the lowest checks."""
        if self.rank != min(self._meets) or waited - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = waited
        meeting = Liveness(self._board, INTERVAL_S)
        meeting.look(rank for rank in self._meets if rank != self.rank)
        there = [post.position == self.position for post in meeting.posts.values()]
        if not all(there) or len(there) < len(self._meets) - 1:
            self._all_there_s = waited
        return waited - self._all_there_s > CONNECT_S

    def _judge(self, received: signal.Signals) -> None:
        """Handle a launcher's request to end, because another rank died or the user wants the run to stop."""
        ends = self._stopped.is_set() or self.num_steps is None
        if not ends:
            self.stop_asked = signal.Signals(received).name
        if not self._stopped.is_set() and (problem := self.blame()):
            self._fail(problem)
        if ends:
            os._exit(128 + received)

    def _fail(self, problem: str) -> None:
        if self._failure is not None or not self._failing.acquire(blocking=False):
            return
        last_seen = self._liveness.others(problem)
        if at_device := self.device_position():
            problem = f"{problem}; its device {at_device}"
        self._on_failure(f"rank {self.rank} stops at {self.position}: {problem}{last_seen}")
