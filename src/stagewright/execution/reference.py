"""The present speed of a machine: a reference computation, timed by the probe and again between the steps of a run, and
the time for which ranks wait for a processor that other programs have.
"""

from __future__ import annotations

import math
import time

import torch

from stagewright.execution.clock import moment, synchronize, undelayed_s

_WIDTHS = {"cpu": 256, "cuda": 2048}
"""Width of the two square fp32 matrices that are multiplied, by kind of device: less than a millisecond, 48 MiB on a GPU."""

_CALLS = 4
"""Minimum number of calls that are timed together, after one that loads code and operands into the cache."""

_MOST_SHARE = 0.01
"""Maximum fraction of a run's time spent on the reference computation."""

_MOST_S = 0.05
"""Maximum seconds of one measurement."""


class Reference:
    """The reference computation: a matmul that is the same on every machine and in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        width = _WIDTHS.get(device.type, _WIDTHS["cuda"])
        self._left, self._right = (torch.full((width, width), 0.5, device=device) for _ in range(2))
        self._result = torch.empty_like(self._left)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._result)

    def seconds(self, during_s: float = 0.0) -> float:
        """Return the seconds of one matmul on the machine as it is now: the mean over about `during_s`, without time in
        which other programs had the processor."""
        self()
        synchronize(self.device)
        began, calls = moment(), 0
        end = time.perf_counter() + during_s
        while not calls or time.perf_counter() < end:
            for _ in range(_CALLS):
                self()
            calls += _CALLS
            synchronize(self.device)
        return undelayed_s(began) / calls


class SpeedWatch:
    """A monitor of a machine's slowdown since it was probed: by the reference computation, which takes at most one percent
    of the time between steps, and by the time for which ranks wait for a processor.

    Args:
        probed_s: seconds of the reference computation in the probe; None disables the monitor.
    """

    def __init__(self, device: torch.device, probed_s: float | None) -> None:
        self._reference = None if probed_s is None else Reference(device)
        self._probed_s = probed_s or math.inf
        self._next = 0
        self._ratio = 1.0
        self.slowdowns: list[tuple[int, float]] = []
        """Steps of this run, each with the ratio of its time to that when probed."""

    def after(self, step: int, step_seconds: float, waited: float) -> None:
        """Record step number `step` of this run, of which this rank `waited` some seconds for a processor."""
        if self._reference is None:
            return
        if step >= self._next:
            wanted_s = min(_MOST_SHARE * step_seconds / 2, _MOST_S)
            taken = self._reference.seconds(wanted_s)
            self._ratio = taken / self._probed_s
            every = max((_CALLS + 1) * taken, wanted_s) / (_MOST_SHARE * step_seconds)
            self._next = step + max(1, math.ceil(every))
        undelayed_seconds = max(step_seconds - waited, step_seconds / 100)
        self.slowdowns.append((step, self._ratio * step_seconds / undelayed_seconds))
