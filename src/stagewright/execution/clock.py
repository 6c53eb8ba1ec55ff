"""Clocks: times of actions on this rank, this rank's offset from the first rank's clock, and undelayed time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stagewright.errors import RunError
from stagewright.execution.accelerator import DeviceEvent, accelerator_of
from stagewright.execution.heartbeat import Seal
from stagewright.execution.rendezvous import Meeting, own_seal, own_store

_NUM_PINGS = 20


@dataclass(frozen=True)
class ClockOffset:
    """The offset from this rank's clock to the first rank's: `seconds` to add, wrong by at most `error_seconds`.

    Ignores: drift between the measurement and the times it is applied to (some 1e-5 of the time between).
    """

    seconds: float = 0.0
    error_seconds: float = 0.0


def clock_offset(rank: int, num_ranks: int, timeout_s: float = 30.0) -> ClockOffset:
    """Measure the offset of this rank's clock; every rank must call this, as the first answers the others in turn.

    Processes that one of ours started are on one machine, whose monotonic clock they share.

    A rank asks for the first rank's time and takes the answer as the time of the middle of the round trip. Of many
    round trips the shortest counts; the answer is at most half of it from the middle. The store carries the messages,
    so that this works with every backend of the collectives.

    Source: Cristian 1989, "Probabilistic clock synchronization".
    """
    if Meeting.joined() is not None:
        return ClockOffset()
    store, seal = own_store(timeout_s), own_seal()
    if rank == 0:
        for other in range(1, num_ranks):
            for ping in range(_NUM_PINGS):
                store.get(f"clock/{other}/{ping}/ask")
                place = f"clock/{other}/{ping}/answer"
                store.set(place, seal.close(place, repr(time.perf_counter())).hex())
        return ClockOffset()
    pings = (_ask(store, seal, rank, ping) for ping in range(_NUM_PINGS))
    return min(pings, key=lambda offset: offset.error_seconds)


def _ask(store: dist.Store, seal: Seal, rank: int, ping: int) -> ClockOffset:
    sent_s = time.perf_counter()
    store.set(f"clock/{rank}/{ping}/ask", "")
    place = f"clock/{rank}/{ping}/answer"
    sealed_answer = seal.open(place, bytes.fromhex(store.get(place).decode()))
    if sealed_answer is None:
        raise RunError(
            "the answer with the first rank's time has a wrong seal: set STAGEWRIGHT_TOKEN to the same secret on every host"
        )
    answer = float(sealed_answer)
    received_s = time.perf_counter()
    return ClockOffset(answer - (sent_s + received_s) / 2, (received_s - sent_s) / 2)


_SCHEDULING = "/proc/thread-self/schedstat"
"""Linux's scheduling statistics of a thread: nanoseconds running, nanoseconds ready but waiting, number of time slices."""

_open = threading.local()


def waited_s() -> float:
    """Return the seconds for which this thread has waited for a processor since it began; 0 where the system does not say.
    Ignores: time taken by a hypervisor; other threads, for which this one may wait.
    """
    descriptor = getattr(_open, "descriptor", None)
    if descriptor is None:
        try:
            descriptor = os.open(_SCHEDULING, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            descriptor = -1
        _open.descriptor = descriptor
    return 0.0 if descriptor < 0 else int(os.pread(descriptor, 128, 0).split()[1]) * 1e-9


@dataclass(frozen=True)
class ThreadTime:
    """A moment of this thread: its time, and the seconds it had waited for a processor until then."""

    clock_s: float
    waited_s: float


def moment() -> ThreadTime:
    """Return the present moment."""
    return ThreadTime(time.perf_counter(), waited_s())


def undelayed_s(since: ThreadTime) -> float:
    """Return the seconds since a moment, without those in which this thread waited for a processor. At least a tenth of the
    time counts, since the system reports waiting only to a tick of its clock."""
    taken = time.perf_counter() - since.clock_s
    return max(taken - (waited_s() - since.waited_s), 0.1 * taken)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work; return at once for a CPU."""
    accelerator_of(device).synchronize()


class ActionTimer:
    """A timer that marks moments in the work of a device and reads their times later.

    On a GPU, work is queued and runs later than it is issued, so a mark is an event in the queue. The device's clock is
    compared with the host's at the start, when the timer waits for the device, and then whenever a batch begins with an
    empty queue.

    Ignores: the drift of the two clocks while no batch begins with an empty queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self._accelerator.synchronize()
        self._anchor, self._anchor_s = self.mark(), time.perf_counter()

    def begin(self) -> None:
        """Prepare for the marks of a batch."""
        if self._accelerator.current_stream().query():
            self._anchor, self._anchor_s = self.mark(), time.perf_counter()

    def mark(self) -> DeviceEvent:
        """Mark this moment, for `seconds`."""
        return self._accelerator.mark()

    def seconds(self, mark: DeviceEvent) -> float:
        """Return the time of a mark by this process's monotonic clock; on a GPU, its work must be done."""
        return self._anchor_s + self._anchor.elapsed_time(mark) / 1e3
