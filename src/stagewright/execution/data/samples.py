"""Packing of documents into samples: cut from one row of tokens, or put together whole.

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
"""Number of samples that are filled at once: more of them would hardly reduce padding."""


@dataclass(frozen=True)
class Sample:
    """Token ids, a mask of those that count in the loss (None: all), and their positions in their documents (None: in the
    sample)."""

    ids: np.ndarray
    learnt: np.ndarray | None = None
    positions: np.ndarray | None = None


class Samples(ABC):
    """The samples of a source, all of one length; `size` is their number, None where it is unknown."""

    size: int | None

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...


class Windows(Samples):
    """Documents one after another, cut every `length` tokens; the remainder at the end is not used.

    With their `ends`, documents are separated: positions restart, and a document's first token does not count in the loss.
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
    """Whole documents put together, as many as fit into `length` tokens; the remainder of a sample is padding.

    A document that is longer than a sample loses its end. The choice of documents of a sample depends only on their lengths
    and `seed`.

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
            learnt[place] = False  # no token of its document comes before it
            positions[here] = np.arange(size)
            place += size
        positions[place:] = np.arange(self._length - place)
        return Sample(ids, learnt, positions)


def _packed(documents: list[int], sizes: np.ndarray, length: int) -> list[list[int]]:
    """Return the documents of each sample, in the order in which the samples were begun.

    >>> _packed([0, 1, 2, 3], np.array([5, 3, 3, 8]), 8)
    [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of open samples: free tokens, and number; fullest first
    for document in documents:
        size = int(sizes[document])
        at = bisect_left(free, (size, -1))
        if at < len(free):
            free_tokens, number = free.pop(at)
            packs[number].append(document)
        else:
            free_tokens, number = length, len(packs)
            packs.append([document])
        if free_tokens > size:
            insort(free, (free_tokens - size, number))
            if len(free) > _OPEN:
                free.pop(0)
    return packs


def samples_of(store: TokenStore, length: int, seed: int, is_apart: bool) -> Samples:
    """Return the samples of a store. Documents with prompts are kept whole; others are cut where samples end."""
    if store.manifest.is_masked:
        return Packs(store, length, seed)
    return Windows(store.tokens, length, store.ends if is_apart else None)
