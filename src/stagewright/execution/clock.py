"""Clocks: when an action starts and ends on this rank, how this rank's clock stands to the first rank's, and one that stands
still while other programs have the processor.
"""

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
    """Add `seconds` to a time of this rank to have it by the first rank's clock; wrong by at most `error_seconds`.

    Ignores: drift between the measurement and the times it is applied to (some 1e-5 of what lies between).
    """

    seconds: float = 0.0
    error_seconds: float = 0.0


def clock_offset(rank: int, num_ranks: int, timeout_s: float = 30.0) -> ClockOffset:
    """The offset of this rank's clock; every rank must call this, as the first answers each of the others in turn.

    Processes that one of ours started are on one machine, whose monotonic clock they share.

    A rank asks for the first rank's time and takes the answer for that of the middle of the round trip. Of many
    round trips the shortest counts; its true middle is at most half of it away. The store carries the messages,
    so that this works whatever the backend of the collectives.

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
    return min(pings, key=lambda found: found.error_seconds)


def _ask(store: dist.Store, seal: Seal, rank: int, ping: int) -> ClockOffset:
    asked = time.perf_counter()
    store.set(f"clock/{rank}/{ping}/ask", "")
    place = f"clock/{rank}/{ping}/answer"
    told = seal.open(place, bytes.fromhex(store.get(place).decode()))
    if told is None:
        raise RunError(
            "the first rank's time came from somebody else: set STAGEWRIGHT_TOKEN to the same secret on every host"
        )
    answer = float(told)
    answered = time.perf_counter()
    return ClockOffset(answer - (asked + answered) / 2, (answered - asked) / 2)


_SCHEDULING = "/proc/thread-self/schedstat"
"""Of Linux: nanoseconds that a thread has run, those it was ready to run and had no processor, and its turns."""

_open = threading.local()


def waited_s() -> float:
    """Seconds for which this thread was ready to run while other programs had the processors, since it began; 0 where the
    system does not say. Ignores: what a hypervisor takes; other threads, for which this one may wait.
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
    """Of this thread: by its clock, and how long it had waited for a processor until then."""

    clock_s: float
    waited_s: float


def moment() -> ThreadTime:
    """Now."""
    return ThreadTime(time.perf_counter(), waited_s())


def undelayed_s(since: ThreadTime) -> float:
    """Seconds since a moment in which this thread had a processor or wanted none. What the system says of waiting is to a
    tick of its clock, so that a tenth of the time is left at the least."""
    taken = time.perf_counter() - since.clock_s
    return max(taken - (waited_s() - since.waited_s), 0.1 * taken)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for; a CPU has."""
    accelerator_of(device).synchronize()


class ActionTimer:
    """Marks moments of the work of a device and says later when they were.

    On a GPU, work is queued and runs later than it is asked for, so a mark is an event in the queue of work. The device's
    clock is compared with the host's first, when the timer waits for the device, and then whenever a batch begins and the
    queue is empty.

    Ignores: the drift of the two clocks while no batch begins with an empty queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self._accelerator.synchronize()
        self._anchor, self._anchor_s = self.mark(), time.perf_counter()

    def begin(self) -> None:
        """Get ready for the marks of a batch."""
        if self._accelerator.current_stream().query():
            self._anchor, self._anchor_s = self.mark(), time.perf_counter()

    def mark(self) -> DeviceEvent:
        """Return this moment, which `seconds` takes."""
        return self._accelerator.mark()

    def seconds(self, mark: DeviceEvent) -> float:
        """Return when a moment was, by this process's monotonic clock; on a GPU, once its work is done."""
        return self._anchor_s + self._anchor.elapsed_time(mark) / 1e3
