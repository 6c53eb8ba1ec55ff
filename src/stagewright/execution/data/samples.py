"""Documents packed to the length of a sample: cut out of one row of tokens, or put together whole.

Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.execution.data.store import TokenStore
from stagewright.tracing.keys import key

_OPEN = 64
"""Samples that are being filled at once: with more, hardly less is padding."""


@dataclass(frozen=True)
class Sample:
    """Token ids, which of them are learnt (None: all), and of each its place in its document (None: that of the sample)."""

    ids: np.ndarray
    learnt: np.ndarray | None = None
    positions: np.ndarray | None = None


class Samples(ABC):
    """The samples of one source, all of one length; `size` of them, None where only reading them all would tell."""

    size: int | None

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...


class Windows(Samples):
    """Documents one after the other, cut every `length` tokens; what is left at the end is not used.

    With their `ends` they are kept apart: positions begin anew, and a document's first token is not to be learnt from the
    one before.
    """

    def __init__(self, tokens: np.ndarray, length: int, ends: np.ndarray | None = None) -> None:
        self._tokens, self._length, self._ends = tokens, length, ends
        self.size = len(tokens) // length

    def __getitem__(self, index: int) -> Sample:
        place = slice(index * self._length, (index + 1) * self._length)
        ids = np.asarray(self._tokens[place], dtype=np.int64)
        if self._ends is None:
            return Sample(ids)
        within = np.searchsorted(self._ends, [place.start, place.stop - 1], side="right")
        begins = np.asarray(self._ends[slice(*within)]) - place.start
        learnt, starts = np.ones(self._length, bool), np.zeros(self._length, np.int64)
        learnt[begins], starts[begins] = False, begins
        return Sample(ids, learnt, np.arange(self._length) - np.maximum.accumulate(starts))


class Packs(Samples):
    """Whole documents put together, as many as go into `length` tokens; the rest of a sample is padding.

    A document that is longer than a sample loses its end. Which documents share a sample depends on nothing but their
    lengths and `seed`.

    Source: best fit among a bounded number of open bins, documents in random order.
    """

    def __init__(self, store: TokenStore, length: int, seed: int) -> None:
        self._store, self._length = store, length
        ends = np.asarray(store.ends)
        self._starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self._sizes = np.minimum(ends - self._starts, length)
        order = np.argsort([key(seed, number) for number in range(len(ends))], kind="stable")
        self._packs = _packed(order.tolist(), self._sizes, length)
        self.size = len(self._packs)

    def __getitem__(self, index: int) -> Sample:
        ids = np.full(self._length, self._store.manifest.pad, np.int64)
        learnt = np.zeros(self._length, bool)
        positions = np.arange(self._length)
        marks, place = self._store.learnt, 0
        for document in self._packs[index]:
            size, start = int(self._sizes[document]), int(self._starts[document])
            here = slice(place, place + size)
            ids[here] = self._store.tokens[start : start + size]
            learnt[here] = True if marks is None else marks[start : start + size]
            learnt[place] = False  # nothing comes before it that it could follow from
            positions[here] = np.arange(size)
            place += size
        positions[place:] = np.arange(self._length - place)
        return Sample(ids, learnt, positions)


def _packed(documents: list[int], sizes: np.ndarray, length: int) -> list[list[int]]:
    """The documents of each sample, in the order in which the samples were begun.

    >>> _packed([0, 1, 2, 3], np.array([5, 3, 3, 8]), 8)
    [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of open samples: tokens that are free, and number; fullest first
    for document in documents:
        size = int(sizes[document])
        at = bisect_left(free, (size, -1))
        if at < len(free):
            left, number = free.pop(at)
            packs[number].append(document)
        else:
            left, number = length, len(packs)
            packs.append([document])
        if left > size:
            insort(free, (left - size, number))
            if len(free) > _OPEN:
                free.pop(0)
    return packs
