"""How fast a machine is at present: a fixed computation, timed by the probe and again between the steps of a run, and how
long ranks wait for a processor that other programs have.
"""

from __future__ import annotations

import math
import time

import torch

from stagewright.execution.clock import moment, synchronize, undelayed_s

_WIDTHS = {"cpu": 256, "cuda": 2048}
"""Of the two square matrices in fp32 that are multiplied: less than a millisecond, and 48 MiB on a GPU."""

_CALLS = 4
"""Timed together at the least, behind one that brings code and operands near."""

_MOST_SHARE = 0.01
"""Of a run's time that may go into looking."""

_MOST_S = 0.05
"""Of one look."""


class Reference:
    """The product of two matrices, the same on every machine and in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        width = _WIDTHS.get(device.type, _WIDTHS["cuda"])
        self._left, self._right = (torch.full((width, width), 0.5, device=device) for _ in range(2))
        self._result = torch.empty_like(self._left)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._result)

    def seconds(self, during_s: float = 0.0) -> float:
        """Of one product, as the machine is now: the mean over products for about so long, in which the processor was this
        thread's."""
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
    """How much longer than when the machine was probed a step takes on it: because the reference does, which is looked at
    between steps for at most one percent of the time, and because ranks wait for a processor.

    Args:
        probed_s: what the probe measured; None: nothing to compare with, and nothing is looked at.
    """

    def __init__(self, device: torch.device, probed_s: float | None) -> None:
        self._reference = None if probed_s is None else Reference(device)
        self._probed_s = probed_s or math.inf
        self._next = 0
        self._ratio = 1.0
        self.slowdowns: list[tuple[int, float]] = []
        """(step of this run, how many times as long as when probed)."""

    def after(self, step: int, step_seconds: float, waited: float) -> None:
        """Step number `step` of this run is done, by all ranks; this one `waited` so many seconds of it for a processor."""
        if self._reference is None:
            return
        if step >= self._next:
            wanted_s = min(_MOST_SHARE * step_seconds / 2, _MOST_S)
            taken = self._reference.seconds(wanted_s)
            self._ratio = taken / self._probed_s
            every = max((_CALLS + 1) * taken, wanted_s) / (_MOST_SHARE * step_seconds)
            self._next = step + max(1, math.ceil(every))
        left = max(step_seconds - waited, step_seconds / 100)
        self.slowdowns.append((step, self._ratio * step_seconds / left))
