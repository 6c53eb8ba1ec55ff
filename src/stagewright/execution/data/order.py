"""The order of samples: a function of seed and number alone, so that a run can resume at any step without a state.

Nothing here imports torch.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from stagewright.tracing.keys import key

_ROUNDS = 6
_BLOCK = 2**20
"""Number of samples in which each source of a mixture has its share, to within one sample."""
_EPOCHS, _BLOCKS = 0x45504F43, 0x424C4F43
"""Constants that distinguish the random numbers of epochs and blocks."""


class Permutation:
    """A random permutation of the numbers below `size`, keyed by `seed`; each number is computed from its place alone.

    Source: a Feistel network over the next power of four, whose results that are not below `size` are put through it again
    (cycle walking; Black and Rogaway 2002).

    >>> order = Permutation(10, seed=1)
    >>> sorted(order[place] for place in range(10)) == list(range(10))
    True
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
        self._mask = (1 << self._half) - 1
        self._keys = [key(seed, round) for round in range(_ROUNDS)]

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise IndexError(place)
        while True:
            high, low = place >> self._half, place & self._mask
            for round_key in self._keys:
                high, low = low, high ^ (key(round_key, low) & self._mask)
            place = high << self._half | low
            if place < self.size:
                return place


class SampleOrder:
    """The order of samples of a mixture: `order[number]` is the source of a sample, and its index there.

    A source gives all of its samples, in a separate order for each epoch, before it repeats one; a source whose size is None
    gives them in its own order. Of every million samples a source has the share of its weight, at random places.

    >>> order = SampleOrder([4, 100], [1.0, 3.0], seed=0)
    >>> first = [order[number] for number in range(200)]
    >>> 35 < sum(source == 0 for source, _ in first) < 65
    True
    >>> [sorted(index for source, index in first if source == 0)[:1], {source for source, _ in first}]
    [[0], {0, 1}]
    """

    def __init__(self, sizes: Sequence[int | None], weights: Sequence[float], seed: int) -> None:
        self._sizes = sizes
        self._seed = seed
        whole = sum(map(Fraction, weights))
        self._ends = [share / whole for share in accumulate(map(Fraction, weights))]
        self._permutation = functools.lru_cache(maxsize=8 + 2 * len(sizes))(Permutation)

    def __getitem__(self, number: int) -> tuple[int, int]:
        source, count = self._source(number)
        size = self._sizes[source]
        if size is None:
            return source, count
        epoch, place = divmod(count, size)
        return source, self._permutation(size, key(self._seed, _EPOCHS, source, epoch))[place]

    def _source(self, number: int) -> tuple[int, int]:
        """Return the source of a sample, and the number of earlier samples of that source."""
        if len(self._sizes) == 1:
            return 0, number
        block, place = divmod(number, _BLOCK)
        slot = self._permutation(_BLOCK, key(self._seed, _BLOCKS, block))[place]
        start = 0
        for source in range(len(self._sizes)):
            before = self._given(source, block)
            count = self._given(source, block + 1) - before
            if slot < start + count:
                return source, before + slot - start
            start += count
        raise AssertionError("the sources of a block fill it")

    def _given(self, source: int, blocks: int) -> int:
        """Return the number of samples of a source in the first `blocks` blocks."""
        before = self._ends[source - 1] if source else Fraction(0)
        return int(self._ends[source] * blocks * _BLOCK) - int(before * blocks * _BLOCK)


def number_of(step: int, lengths: Sequence[int], global_batch: int) -> int:
    """Return the number of samples of a step's length before the step, where steps cycle through `lengths`.

    >>> number_of(5, (), 8), [number_of(step, (512, 4096, 512), 8) for step in range(5)]
    (40, [0, 0, 8, 16, 8])
    """
    if not lengths:
        return step * global_batch
    rounds, place = divmod(step, len(lengths))
    length = lengths[place]
    return (rounds * lengths.count(length) + lengths[:place].count(length)) * global_batch


class OnceThrough:
    """The order of every sample of every source once, one source after another; then from the beginning again, to fill the
    last batch.

    >>> once = OnceThrough([2, 1])
    >>> [once[number] for number in range(4)], once.size
    ([(0, 0), (0, 1), (1, 0), (0, 0)], 3)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(accumulate(sizes))
        self.size = self._ends[-1]

    def __getitem__(self, number: int) -> tuple[int, int]:
        place = number % self.size
        source = bisect_right(self._ends, place)
        return source, place - (self._ends[source - 1] if source else 0)
