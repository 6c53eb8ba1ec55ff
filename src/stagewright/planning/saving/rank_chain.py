"""What a rank keeps and recomputes: the fastest sequence of pieces along its chains whose memory stays within a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled
from stagewright.planning.saving.chain import Chain
from stagewright.planning.saving.pieces import PieceNetwork, Point

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Stretches between neighbouring boundaries that a piece may consist of; beside these, a whole stage."""

_THOROUGH = 2
"""Pieces of up to so many are looked at operator by operator."""

_MOST_LABELS = 96
"""Ways kept at every boundary."""

_BINS = 8 * _MOST_LABELS
"""Of more ways than this, those that keep nearly as much as each other are told apart by time alone."""

_DEARER = 0.02
"""Of the time of the link: what moving a byte costs where the link has time for it, so that nothing is moved without need,
and what is made last, and used first, only where nothing else is."""

_HALVINGS = 7
"""Limits tried for the lowest peak."""

_RESERVES = 4
"""How much of the limit may be left for what is recomputed and for the backward's results is tried in so many steps."""


@dataclass(frozen=True)
class Found:
    """What runs again, what is kept for that alone and what is on the host in between, as pairs of a stage and an operator
    (id), and the seconds this adds to a microbatch."""

    ran: frozenset[tuple[int, int]]
    checkpoints: frozenset[tuple[int, int]]
    moved: frozenset[tuple[int, int]]
    seconds: float


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one chain, in the order of where they end: one row or entry each."""

    ends: Ints
    """Of every boundary, the first of the pieces that end there; and one entry more."""
    starts: Ints
    """The boundary at which a piece starts."""
    transient: Floats
    first_point: Ints
    """Of its points, in `points`; and one entry more."""
    points: Floats
    """Seconds, kept bytes and work, a row each."""


@dataclass(frozen=True)
class _Labels:
    """Ways to get to every boundary of a chain, a row of so many each: bytes kept up to there by weight, seconds, and where
    they come from."""

    numbers: Ints
    kept: Floats
    seconds: Floats
    before: Ints
    """Boundary, label, point."""


class KnownPieces:
    """The pieces of chains that were looked at, over links of so many seconds per byte: the same for equal chains, on any
    stage, and equal pieces of others have the same points."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._of_chain: dict[tuple[int, float], _Pieces] = {}
        self._at: dict[tuple[int, float, int, int], tuple[Point, ...]] = {}
        self._points: dict[tuple[object, ...], tuple[Point, ...]] = {}

    def of_chain(self, chain: Chain, link_s_per_byte: float) -> _Pieces:
        """All pieces that are tried."""
        key = self._number(chain), link_s_per_byte
        if key not in self._of_chain:
            last = len(chain.boundaries) - 1
            ends, starts, transient, columns = [0], list[int](), list[float](), list[Floats]()
            for stop in range(last + 1):
                lengths = {length for length in (*_LENGTHS, stop if stop == last else 1) if length <= stop}
                for length in sorted(lengths):
                    start = stop - length
                    starts.append(start)
                    transient.append(chain.transient(chain.boundaries[start], chain.boundaries[stop]))
                    columns.append(self._columns(chain, start, stop, link_s_per_byte))
                ends.append(len(starts))
            numbers = np.cumsum([0, *(each.shape[1] for each in columns)])
            points = np.concatenate(columns, axis=1) if columns else np.zeros((3, 0))
            self._of_chain[key] = _Pieces(
                np.array(ends), np.array(starts, np.int64), np.array(transient, float), numbers, points
            )
        return self._of_chain[key]

    def points(self, chain: Chain, start: int, stop: int, link_s_per_byte: float) -> tuple[Point, ...]:
        """Of the piece between two boundaries."""
        key = self._number(chain), link_s_per_byte, start, stop
        if key not in self._at:
            network = network_of(chain, start, stop)
            is_thorough = stop - start <= _THOROUGH
            signature = network.signature, link_s_per_byte, is_thorough
            if signature not in self._points:
                self._points[signature] = network.points(is_thorough, link_s_per_byte)
            self._at[key] = self._points[signature]
        return self._at[key]

    def _number(self, chain: Chain) -> int:
        return self._numbers.setdefault(chain.shape, len(self._numbers))

    def _columns(self, chain: Chain, start: int, stop: int, link_s_per_byte: float) -> Floats:
        """Seconds, kept bytes and work of the points of a piece, one row each."""
        dear = (
            _DEARER
            * (1 + stop / len(chain.boundaries))
            * (0.0 if math.isinf(link_s_per_byte) else link_s_per_byte)
        )
        rows = [
            (point.seconds + dear * point.moved_bytes, point.kept_bytes, point.work_bytes)
            for point in self.points(chain, start, stop, link_s_per_byte)
        ]
        return np.array(rows, float).T


def network_of(chain: Chain, start: int, stop: int) -> PieceNetwork:
    """Between two boundaries."""
    ends = chain.boundaries
    return PieceNetwork(chain, ends[start], ends[stop], stop == len(ends) - 1)


@dataclass
class RankChain:
    """The chains of the stages of one rank; `copies[i]` sets of what stage `i` of them saves are alive at the peak.

    While the backward of a stage is at a piece, the set in use has what is kept in front of the piece and in it, every other
    set all that is kept, and beside them there is what is recomputed of the piece and the backward's own results.

    Where there is a link to the host (`link_s_per_byte` is finite), a piece may have what it keeps there; the link is busy
    for it while the forward, and later the backward, are at the piece, and what exceeds the time of the forward is added.

    Ignores: results of the recomputed operators that no backward needs; values that several pieces keep count for each;
    what is back from the host ahead of its piece; time of the link that other pieces leave.
    """

    chains: Sequence[Chain]
    copies: Sequence[float]
    known: KnownPieces
    """May be shared by ranks."""
    link_s_per_byte: float = math.inf

    @property
    def most_bytes(self) -> float:
        """At the peak if everything is kept."""
        return max(
            self._others(index)
            + max(
                (
                    float(chain.needed_before[b]) + chain.transient(a, b)
                    for a, b in pairwise(chain.boundaries)
                ),
                default=0.0,
            )
            for index, chain in enumerate(self.chains)
        )

    def _others(self, index: int) -> float:
        """Bytes of all sets but the one in use, whose stage is `index`, if everything is kept."""
        sets = [copies - (at == index) for at, copies in enumerate(self.copies)]
        if self._holds_one_set:
            sets = [float(at < index) for at in range(len(sets))]
        return sum(number * chain.needed_bytes for number, chain in zip(sets, self.chains, strict=True))

    def choose(self, limit: float) -> Found | None:
        """The fastest way whose peak stays within `limit`; None if there is none among those looked at."""
        if self._holds_one_set:
            return self._within(limit, limit)
        found = [self._within(limit, limit - reserve) for reserve in self._reserves]
        return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    @property
    def _holds_one_set(self) -> bool:
        """Whether all that is saved at the peak is of one microbatch, so that what comes later is gone."""
        return all(copies <= 1 for copies in self.copies)

    @cached_property
    def _reserves(self) -> list[float]:
        """From what the backward's results take at most to what they do where all of a stretch is recomputed."""
        least = most = 0.0
        for chain in self.chains:
            for stop, (first, last) in enumerate(pairwise(chain.boundaries), start=1):
                transient = chain.transient(first, last)
                work = max(point.work_bytes for point in self._points(chain, stop - 1, stop))
                least, most = max(least, transient), max(most, transient + work)
        return np.linspace(least, most, _RESERVES).tolist()

    def least(self) -> Found | None:
        """A way of nearly the lowest peak."""
        low, high = 0.0, self.most_bytes
        best = self.choose(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self.choose(middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best

    def _within(self, limit: float, kept_limit: float) -> Found | None:
        """With at most `kept_limit` bytes kept in all sets."""
        alone = len(self.chains) == 1 or self._holds_one_set
        share = (self.copies[0] - 1) / self.copies[0] if alone else 1.0
        reserved = share * kept_limit
        kept, seconds = np.zeros(1), np.zeros(1)
        tables: list[_Labels] = []
        for index in range(len(self.chains)):
            pieces = self.known.of_chain(self.chains[index], self.link_s_per_byte)
            weight = float(self.copies[index])
            table = _Labels(
                *_ways(
                    pieces.ends, pieces.starts, pieces.transient, pieces.first_point, pieces.points,
                    kept, seconds, weight, limit - reserved, kept_limit, alone,
                )
            )  # fmt: skip
            number = int(table.numbers[-1])
            if not number:
                return None
            tables.append(table)
            kept, seconds = table.kept[-1, :number], table.seconds[-1, :number]
        return self._traced(tables, int(np.argmin(seconds)))

    def _traced(self, tables: Sequence[_Labels], label: int) -> Found:
        """The way that ends in `label` of the last boundary."""
        again: list[set[int]] = [set() for _ in self.chains]
        moved = set[tuple[int, int]]()
        seconds = float(tables[-1].seconds[-1, label])
        for index in range(len(self.chains) - 1, -1, -1):
            chain, at = self.chains[index], len(self.chains[index].boundaries) - 1
            while at > 0:
                start, previous, number = tables[index].before[at, label].tolist()
                first = chain.boundaries[start]
                point = self._points(chain, start, at)[number]
                again[index].update(first + operator for operator in point.ran)
                moved.update((chain.stage, chain.nodes[one].id) for one in _moved(chain, start, at, point))
                at, label = start, previous
        ran, checkpoints = set[tuple[int, int]](), set[tuple[int, int]]()
        for chain, numbers in zip(self.chains, again, strict=True):
            taken = {chain.storages[root] for number in numbers for root in chain.uses[number]}
            kept = {one.maker for one in taken if one.maker not in numbers and not one.needed}
            ran |= {(chain.stage, chain.nodes[number].id) for number in numbers}
            checkpoints |= {(chain.stage, chain.nodes[number].id) for number in kept}
        return Found(frozenset(ran), frozenset(checkpoints), frozenset(moved - ran), seconds)

    def _points(self, chain: Chain, start: int, stop: int) -> tuple[Point, ...]:
        return self.known.points(chain, start, stop, self.link_s_per_byte)


def _moved(chain: Chain, start: int, stop: int, point: Point) -> list[int]:
    """Numbers of the operators whose storages a point of a piece has on the host."""
    if not point.moved:
        return []
    first, roots = chain.boundaries[start], list(network_of(chain, start, stop).outside)
    return [first + one if one >= 0 else chain.storages[roots[-1 - one]].maker for one in point.moved]


@compiled
def _ways(
    ends: Ints,
    starts: Ints,
    transient: Floats,
    first_point: Ints,
    points: Floats,
    first_kept: Floats,
    first_seconds: Floats,
    weight: float,
    headroom: float,
    kept_limit: float,
    alone: bool,
) -> tuple[Ints, Floats, Floats, Ints]:
    """The fields of `_Labels`, from the labels of the first boundary on."""
    num_ends = len(ends) - 1
    numbers = np.zeros(num_ends, np.int64)
    kept, seconds = np.zeros((num_ends, _MOST_LABELS)), np.zeros((num_ends, _MOST_LABELS))
    before = np.zeros((num_ends, _MOST_LABELS, 3), np.int64)
    numbers[0] = len(first_kept)
    kept[0, : numbers[0]], seconds[0, : numbers[0]] = first_kept, first_seconds
    for stop in range(1, num_ends):
        most = 0
        for piece in range(ends[stop], ends[stop + 1]):
            most += numbers[starts[piece]] * (first_point[piece + 1] - first_point[piece])
        now, took, origin = np.empty(most), np.empty(most), np.empty((most, 3), np.int64)
        count = 0
        for piece in range(ends[stop], ends[stop + 1]):
            start = starts[piece]
            for label in range(numbers[start]):
                for point in range(first_point[piece], first_point[piece + 1]):
                    total = kept[start, label] + weight * points[1, point]
                    in_use = total / weight if alone else 0.0
                    if total <= kept_limit and in_use + points[2, point] + transient[piece] <= headroom:
                        now[count] = total
                        took[count] = seconds[start, label] + points[0, point]
                        origin[count, 0], origin[count, 1] = start, label
                        origin[count, 2] = point - first_point[piece]
                        count += 1
        if count == 0:
            continue
        chosen = _thinned(now[:count], took[:count])
        numbers[stop] = len(chosen)
        for to in range(len(chosen)):
            one = chosen[to]
            kept[stop, to], seconds[stop, to], before[stop, to] = now[one], took[one], origin[one]
    return numbers, kept, seconds, before


@compiled
def _thinned(kept: Floats, seconds: Floats) -> Ints:
    """Of labels those that no other beats in both; of too many those that differ most in bytes."""
    some = _fastest_by_bytes(kept, seconds) if len(kept) > _BINS else np.arange(len(kept))
    # Bytes are whole numbers: this is by bytes, and of equal bytes by seconds, in one pass.
    order = some[np.argsort(kept[some] + seconds[some] / (2 * seconds.max() + 1e-30))]
    chosen = np.empty(len(order), np.int64)
    count, least = 0, np.inf
    for one in order:
        if count == 0 or seconds[one] < least * (1 - 1e-12):
            chosen[count] = one
            count += 1
        least = min(least, seconds[one])
    chosen = chosen[:count]
    if count <= _MOST_LABELS:
        return chosen
    wanted = np.linspace(kept[chosen[0]], kept[chosen[-1]], _MOST_LABELS)
    spread = np.unique(np.searchsorted(kept[chosen], wanted))
    return chosen[np.minimum(spread, count - 1)]


@compiled
def _fastest_by_bytes(kept: Floats, seconds: Floats) -> Ints:
    """The fastest of the labels that keep nearly as much as each other, and the one that keeps least."""
    low, high = kept.min(), kept.max()
    scale = (_BINS - 1) / max(high - low, 1.0)
    fastest = np.full(_BINS, -1, np.int64)
    least = 0
    for one in range(len(kept)):
        bin_ = int((kept[one] - low) * scale)
        known = fastest[bin_]
        if known < 0 or (seconds[one], kept[one]) < (seconds[known], kept[known]):
            fastest[bin_] = one
        if (kept[one], seconds[one]) < (kept[least], seconds[least]):
            least = one
    fastest[0] = least  # others in its bin are nearly as small
    return fastest[fastest >= 0]
