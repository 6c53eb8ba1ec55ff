"""Metering of a rank's steps: bytes alive during some of them, and the times of the actions of one.

On a GPU the allocator counts the bytes. On the CPU a dispatch mode sees every tensor an operator makes and counts its
storage until the last reference is gone; it shares no code with the estimator that it judges.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.rank_runner import BatchResult
from stagewright.planning.job import Job

_GiveTensors = Callable[[], Iterable[torch.Tensor]]


class StorageMeter(TorchDispatchMode):
    """A dispatch mode that counts live bytes of storages while active.

    Args:
        already: tensors that were alive before, such as parameters and optimizer state.
        elsewhere: tensors that do not count, because they represent host memory.
    """

    def __init__(self, already: Iterable[torch.Tensor] = (), elsewhere: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        """Peak of live bytes since `restart`."""
        self._counted: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        for tensor in elsewhere:
            self._counted[tensor.untyped_storage()] = 0
        for tensor in already:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._count(item)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._counted:
            return
        size = storage.nbytes()
        self._counted[storage] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live_bytes -= size

    def restart(self) -> None:
        """Restart the counting of the peak."""
        self.peak_bytes = self.live_bytes


def metered_steps(job: Job, num_steps: int, first: int = 0) -> set[int]:
    """Return the steps from `first` on whose memory is metered: the first of each sequence length, but the very first step,
    in which optimizer state is made, only if its length does not come again.

    >>> metered_steps(Job(global_batch=1, sequence_length=8), 9), metered_steps(Job(global_batch=1, sequence_length=8), 1)
    ({1}, {0})
    >>> metered_steps(Job(global_batch=1, sequence_length=8), 9, first=4)
    {5}
    >>> sorted(metered_steps(Job(global_batch=1, sequence_lengths=(4, 8, 8)), 9))
    [1, 3]
    >>> sorted(metered_steps(Job(global_batch=1, sequence_lengths=(8, 4, 4)), 3))
    [0, 1]
    """
    of_length: dict[int, int] = {}
    for step in (*range(first + 1, num_steps), first):
        of_length.setdefault(job.length_of(step), step)
    return set(of_length.values())


@dataclass(frozen=True)
class ActionBytes:
    """Bytes alive during an action, or another part of a step: the peak, and those that remain after it."""

    position: str
    peak: int
    after: int


@dataclass(frozen=True)
class TimedStep:
    """A step of samples of `length` tokens: its batch, the time at which it began, and the optimizer's seconds after it."""

    length: int
    batch: BatchResult
    began: float
    optimizer_seconds: float


class Metering:
    """The measurements of a run: peak bytes of each sequence length, and bytes and times of the actions of a step of the
    longest one that came."""

    def __init__(self) -> None:
        self.peak_of_length: dict[int, int] = {}
        self.reserved_bytes: int | None = None
        self.timed: TimedStep | None = None
        self.actions: Sequence[ActionBytes] = ()
        """What a metered step of the longest length held, action by action."""
        self._take: Callable[[], tuple[int, int]] | None = None
        self._position = ""
        self._taken: list[ActionBytes] = []

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes in metered steps of any length."""
        return max(self.peak_of_length.values(), default=0)

    def took(self, step: TimedStep) -> None:
        """Keep the times of the finished `step` unless those of a longer one are kept."""
        if self.timed is None or step.length >= self.timed.length:
            self.timed = step

    def at(self, position: str) -> None:
        """Note that `position` begins. In a metered step, keep the bytes of what was before it: an asynchronous device
        counts them when its work is issued, not when it is done."""
        if self._take is not None:
            self._taken.append(ActionBytes(self._position, *self._take()))
        self._position = position

    @contextmanager
    def counting(
        self, length: int, device: torch.device, lasting: _GiveTensors, on_host: _GiveTensors
    ) -> Iterator[None]:
        """Count the live bytes of a step of samples of `length` tokens during the context.

        `lasting` returns the tensors that are alive before, `on_host` those that represent host memory. Both are functions,
        so that nothing here keeps a tensor alive.
        """
        accelerator = accelerator_of(device)
        meter = None if accelerator.counts_bytes else StorageMeter(lasting(), on_host())

        def take() -> tuple[int, int]:
            if meter is not None:
                peak, live = meter.peak_bytes, meter.live_bytes
                meter.restart()
                return peak, live
            self.reserved_bytes = max(self.reserved_bytes or 0, accelerator.peak_reserved_bytes())
            peak, live = accelerator.peak_allocated_bytes(), accelerator.allocated_bytes()
            accelerator.reset_peaks()
            return peak, live

        accelerator.reset_peaks()
        self._taken, self._take = [], take
        try:
            with meter or nullcontext():
                yield
            self.at("end of step")
        finally:
            self._take = None
        peak = max(action.peak for action in self._taken)
        self.peak_of_length[length] = max(peak, self.peak_of_length.get(length, 0))
        if length >= max(self.peak_of_length):
            self.actions = self._taken
