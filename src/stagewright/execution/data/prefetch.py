"""Prefetching of data: a thread reads the microbatches of the next step during the present one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import torch

from stagewright.execution.data.batches import Batches
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.graph import OperatorGraph

Microbatch = dict[str, torch.Tensor]
_Item = TypeVar("_Item")
_LEAVE_S = 10.0
"""Seconds to wait for the user's dataset when the reader is closed; a slower thread ends with the process."""


@dataclass(frozen=True)
class PrefetchRequest:
    """A request for microbatches of a step, each beginning at one of its samples `firsts`: the inputs `names` of `graph`."""

    batches: Batches | SyntheticBatches
    step: int
    firsts: tuple[int, ...]
    graph: OperatorGraph = field(compare=False)
    names: frozenset[str] = field(compare=False)

    def open(self) -> None:
        """Create the datasets of this step's length, if this is their first use."""
        self.batches.open(self.step)

    def read(self) -> Iterator[Microbatch]:
        """Read the microbatches one after another into host memory. Raises what the dataset raises."""
        for first in self.firsts:
            yield self.batches.microbatch(self.step, first, self.graph, self.names)


class Prefetcher:
    """A reader thread that can read the next microbatches ahead. Nothing else may read the same data.

    A dataset that draws from torch's random generator is not read ahead: the model draws from it too. Ignores: draws that
    none of the samples read on demand makes.
    """

    def __init__(self) -> None:
        self._ahead: tuple[PrefetchRequest, _Task[Microbatch]] | None = None
        self._draws = False
        """Whether samples drew random numbers when they were read on demand, while nothing else drew."""
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True, name="stagewright-reader")
        self._thread.start()

    def take(self, wanted: PrefetchRequest) -> list[Microbatch]:
        """Return the requested microbatches, read now unless they were read ahead. Raises what the dataset raised."""
        if self._ahead is not None and self._ahead[0] == wanted:
            (_, ahead), self._ahead = self._ahead, None
            return ahead.result()
        self._begun(lambda: wanted.open() or ()).result()
        before = torch.default_generator.get_state()
        microbatches = self._begun(wanted.read).result()
        self._draws |= not torch.equal(before, torch.default_generator.get_state())
        return microbatches

    def read_ahead(self, wanted: PrefetchRequest) -> None:
        """Begin to read the next request, in place of what was read ahead before."""
        if self._draws:
            return
        self._drop()
        self._ahead = wanted, self._begun(wanted.read)

    def close(self) -> None:
        """Stop reading and end the thread."""
        self._drop()
        self._tasks.put(None)
        self._thread.join(_LEAVE_S)

    def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead[1].is_wanted = False
            self._ahead = None

    def _begun(self, read: Callable[[], Iterable[_Item]]) -> _Task[_Item]:
        task = _Task(read)
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


class _Task(Generic[_Item]):
    """A read and its result. It ends early where it is no longer wanted."""

    def __init__(self, read: Callable[[], Iterable[_Item]]) -> None:
        self.is_wanted = True
        self._read = read
        self._items: list[_Item] = []
        self._error: BaseException | None = None
        self._is_done = Event()

    def run(self) -> None:
        """Read, on the reader's thread."""
        try:
            for item in self._read():
                self._items.append(item)
                if not self.is_wanted:
                    break
        except BaseException as error:  # of whatever kind: `result` raises it
            self._error = error
        self._is_done.set()

    def result(self) -> list[_Item]:
        """Wait for the items and return them."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return self._items
