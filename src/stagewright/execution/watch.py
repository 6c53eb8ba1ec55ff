"""Watching over a run: where every rank stands, and what to say when one of them is gone.

Every rank publishes its position a few times a second through the rendezvous store. A rank whose position no longer
changes hands is dead or frozen; the others say so, with its last action and their own, and stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_INTERVAL_S = 0.25
_DEAD_AFTER_S = 10.0
_SETTLE_S = 1.5
_BLAME_WITHIN_S = 8.0


class Watch:
    """Publishes this rank's position and watches those of the others, in a thread of its own.

    Args:
        rank: global rank of this process.
        num_ranks: how many there are.
        store: a connection of its own to the rendezvous store.
        action_timeout_s: a rank that stays at one action longer than this ends the run.
        on_failure: called with the message instead of ending the process (for tests).
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: dist.Store,
        action_timeout_s: float = 1800.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self.action_timeout_s = action_timeout_s
        self.on_failure = on_failure or _end_process
        self._position = "starting"
        self._since = time.monotonic()
        self._beat = 0
        self._stopped = threading.Event()
        self._failing = threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._last: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="stagewright-watch")

    def start(self) -> None:
        self._publish()
        self._thread.start()

    def at(self, position: str) -> None:
        """This rank is now at `position` (the text of an action)."""
        self._position = position
        self._since = time.monotonic()

    @property
    def position(self) -> str:
        return self._position

    def stop(self) -> None:
        """The run ended well: positions no longer matter."""
        self._position = "finished"
        self._stopped.set()
        if (
            self._thread.is_alive()
        ):  # in a call of the store when the interpreter ends, it would abort the process
            self._thread.join(_DEAD_AFTER_S)
        self._publish()

    def listen_for_termination(self) -> None:
        """Answer SIGTERM (sent by the launcher when another rank died) with a report, even while blocked in a transfer.

        Must be called before other threads are started, so that they inherit the blocked signal.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        def wait() -> None:
            signal.sigwait({signal.SIGTERM})
            self._terminated()

        threading.Thread(target=wait, daemon=True, name="stagewright-sigterm").start()

    def failed(self, message: str) -> None:
        """This rank is about to end with an error of its own: tell the others."""
        self._position = f"failed: {message}"
        self._publish()

    def blame(self) -> str | None:
        """Which rank is gone and where it stood; None once all others have shown signs of life, in a few seconds."""
        self._read()
        before = {rank: beat for rank, (beat, _) in self._seen.items()}
        deadline = time.monotonic() + _BLAME_WITHIN_S
        while time.monotonic() < deadline:
            time.sleep(_INTERVAL_S)
            self._read()
            problem = self._problem(_SETTLE_S)
            if problem:
                return problem
            for rank, (beat, _) in self._seen.items():
                before.setdefault(rank, beat)
            # One later beat may have been on its way when its rank died; a second was sent by a living one.
            if len(before) == self.num_ranks - 1 and all(
                self._seen[rank][0] >= beat + 2 for rank, beat in before.items()
            ):
                return None
        unseen = [rank for rank in range(self.num_ranks) if rank != self.rank and rank not in before]
        return f"rank {unseen[0]} died or froze at the start (it gave no sign of life)" if unseen else None

    # -- inner ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._publish()
            self._read()
            problem = self._problem(_DEAD_AFTER_S)
            if problem:
                self._fail(problem)
                return

    def _publish(self) -> None:
        self._beat += 1
        state = [self._beat, self._position, time.monotonic() - self._since]
        try:
            self.store.set(f"watch/{self.rank}", json.dumps(state))
        except (RuntimeError, dist.DistError):
            if not self._stopped.is_set():
                self._fail("the rendezvous store is gone: the process that hosts it has ended")

    def _read(self) -> None:
        now = time.monotonic()
        for rank in range(self.num_ranks):
            if rank == self.rank:
                continue
            try:
                key = f"watch/{rank}"
                if not self.store.check([key]):
                    continue
                beat, position, _ = json.loads(self.store.get(key))
            except (RuntimeError, dist.DistError, ValueError):
                continue
            self._last[rank] = position
            if self._seen.get(rank, (-1, 0.0))[0] != beat:
                self._seen[rank] = (beat, now)

    def _problem(self, patience: float) -> str | None:
        now = time.monotonic()
        for rank, (_, changed) in self._seen.items():
            position = self._last[rank]
            if position == "finished":
                continue
            if position.startswith("failed: "):
                return f"rank {rank} {position}"
            if now - changed > patience:
                return f"rank {rank} died or froze at {position} (no sign of life for {now - changed:.0f} s)"
        waited = now - self._since
        if waited > self.action_timeout_s:
            return f"this rank has been at {self._position} for {waited:.0f} s, longer than the limit of an action"
        return None

    def _terminated(self) -> None:
        if self._stopped.is_set():
            os._exit(143)
        self._fail(self.blame() or "the launcher asked this rank to stop")

    def _fail(self, problem: str) -> None:
        if not self._failing.acquire(blocking=False):
            return
        others = ", ".join(
            f"rank {rank} at {where}"
            for rank, where in sorted(self._last.items())
            if f"rank {rank} " not in problem
        )
        self.on_failure(
            f"rank {self.rank} stops at {self._position}: {problem}"
            + (f" [last seen: {others}]" if others else "")
        )


def _end_process(message: str) -> None:
    print(f"stagewright: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def host_store() -> dist.Store | None:
    """The rendezvous store, for as long as it is held, where this process has to be the one that hosts it: the first of a
    launcher that, unlike torchrun, has none of its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ["RANK"] != "0":
        return None
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=True, wait_for_workers=False)


def group_store(timeout_s: float) -> dist.Store:
    """A connection for the process group."""
    return dist.PrefixStore("group", own_store(max(timeout_s, 60.0)))


def own_store(timeout_s: float = 30.0) -> dist.Store:
    """A connection to the rendezvous store that no other thread of this process uses."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore("stagewright", store)
