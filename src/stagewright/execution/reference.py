"""How fast a machine is at present: a fixed computation, timed by the probe and again between the steps of a run."""

from __future__ import annotations

import math
import time

import torch

from stagewright.execution.clock import synchronize

_WIDTHS = {"cpu": 256, "cuda": 2048}
"""Of the two square matrices in fp32 that are multiplied: less than a millisecond, and 48 MiB on a GPU."""

_CALLS = 4
"""Timed together at the least, behind one that brings code and operands near."""

_MOST_SHARE = 0.01
"""Of a run's time that may go into looking."""

_MOST_S = 0.05
"""Of one look. It should be long beside the turns in which programs share a processor, a few milliseconds each."""


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
        """Of one product, as the machine is now: the mean over products for about so long."""
        self()
        synchronize(self.device)
        start, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - start < during_s:
            for _ in range(_CALLS):
                self()
            calls += _CALLS
            synchronize(self.device)
        return (time.perf_counter() - start) / calls


class SpeedWatch:
    """Looks between steps how much longer the reference takes than when the machine was probed, at most one percent of the
    time.

    Args:
        probed_s: what the probe measured; None: nothing to compare with, and nothing is looked at.
    """

    def __init__(self, device: torch.device, probed_s: float | None) -> None:
        self._reference = None if probed_s is None else Reference(device)
        self._probed_s = probed_s or math.inf
        self._next = 0
        self.slowdowns: list[tuple[int, float]] = []
        """(step of this run, how many times as long as when probed)."""

    def after(self, step: int, step_seconds: float) -> None:
        """Step number `step` of this run is done, by all ranks."""
        if self._reference is None or step < self._next:
            return
        wanted_s = min(_MOST_SHARE * step_seconds / 2, _MOST_S)
        taken = self._reference.seconds(wanted_s)
        self.slowdowns.append((step, taken / self._probed_s))
        every = max((_CALLS + 1) * taken, wanted_s) / (_MOST_SHARE * step_seconds)
        self._next = step + max(1, math.ceil(every))
