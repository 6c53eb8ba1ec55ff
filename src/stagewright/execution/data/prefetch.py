"""Reading ahead: microbatches are read by a thread, those of the next step while the present one is trained."""

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
"""For what the user's dataset is at when the reader is closed; a thread that takes longer ends with the process."""


@dataclass(frozen=True)
class PrefetchRequest:
    """Microbatches of a step, each from one of the samples `firsts` of it on: the inputs of `graph` that are named."""

    batches: Batches | SyntheticBatches
    step: int
    firsts: tuple[int, ...]
    graph: OperatorGraph = field(compare=False)
    names: frozenset[str] = field(compare=False)

    def open(self) -> None:
        """Datasets that are first asked for samples of this step's length are made."""
        self.batches.open(self.step)

    def read(self) -> Iterator[Microbatch]:
        """One after the other, in memory of the host. Raises what the dataset raises."""
        for first in self.firsts:
            yield self.batches.microbatch(self.step, first, self.graph, self.names)


class Prefetcher:
    """Reads on a thread of its own, so that what is wanted next can be read ahead. Nothing else may read the same data.

    A dataset that draws from torch's own random numbers is not read ahead: the model draws from them too. Ignores: draws
    that no sample made of those which were read while nobody else drew.
    """

    def __init__(self) -> None:
        self._ahead: tuple[PrefetchRequest, _Task[Microbatch]] | None = None
        self._draws = False
        """Whether samples drew random numbers when they were read while nobody else did."""
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True, name="stagewright-reader")
        self._thread.start()

    def take(self, wanted: PrefetchRequest) -> list[Microbatch]:
        """What is wanted, read now unless it was read ahead. Raises what reading it raised."""
        if self._ahead is not None and self._ahead[0] == wanted:
            (_, ahead), self._ahead = self._ahead, None
            return ahead.result()
        self._begun(lambda: wanted.open() or ()).result()
        before = torch.default_generator.get_state()
        found = self._begun(wanted.read).result()
        self._draws |= not torch.equal(before, torch.default_generator.get_state())
        return found

    def read_ahead(self, wanted: PrefetchRequest) -> None:
        """Begin to read what will be wanted next, in place of what was read ahead before."""
        if self._draws:
            return
        self._drop()
        self._ahead = wanted, self._begun(wanted.read)

    def close(self) -> None:
        """Nothing is read any more, and the thread is gone."""
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
    """Something to read, and what came of it. It ends early where it is not wanted any more."""

    def __init__(self, read: Callable[[], Iterable[_Item]]) -> None:
        self.is_wanted = True
        self._read = read
        self._found: list[_Item] = []
        self._error: BaseException | None = None
        self._is_done = Event()

    def run(self) -> None:
        """On the reader's thread."""
        try:
            for item in self._read():
                self._found.append(item)
                if not self.is_wanted:
                    break
        except BaseException as error:  # of whatever kind: it is raised where the result is asked for
            self._error = error
        self._is_done.set()

    def result(self) -> list[_Item]:
        """Once it is there."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return self._found
