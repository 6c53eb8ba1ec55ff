"""The choice of what a rank keeps, recomputes and offloads: the fastest sequence of pieces of its chains within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled
from stagewright.planning.checkpointing.chain import Chain
from stagewright.planning.checkpointing.pieces import PieceNetwork, Point

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Lengths of a piece in intervals between neighbouring boundaries; a whole stage is tried too."""

_THOROUGH = 2
"""Maximum length of pieces that are examined operator by operator."""

_MOST_LABELS = 96
"""Maximum number of partial choices kept at every boundary."""

_BINS = 8 * _MOST_LABELS
"""Number of partial choices above which only the fastest of those that keep about equally many bytes remain."""

_DEARER = 0.02
"""Cost of offloading a byte, as a fraction of its link time, where the link is free: nothing is offloaded without need, and
what is computed last and used first only where nothing else is."""

_HALVINGS = 7
"""Number of limits tried for the lowest peak."""

_RESERVES = 4
"""Number of amounts tried for the part of the limit reserved for recomputed values and the backward's results."""


@dataclass(frozen=True)
class ChainChoice:
    """The operators that are recomputed, kept only for that, or offloaded, as pairs of a stage and an operator (id), and the
    seconds this adds to a microbatch."""

    ran: frozenset[tuple[int, int]]
    checkpoints: frozenset[tuple[int, int]]
    moved: frozenset[tuple[int, int]]
    seconds: float


class _Pieces(NamedTuple):
    """The pieces of one chain, sorted by their ends: one row or entry per piece."""

    ends: Ints
    """The first piece that ends at each boundary, and one entry more."""
    starts: Ints
    """The boundary at which each piece starts."""
    transient: Floats
    first_point: Ints
    """The first point of each piece in `points`, and one entry more."""
    points: Floats
    """Rows of seconds, kept bytes and work bytes."""


class _Labels(NamedTuple):
    """Partial choices up to every boundary of a chain, one row per boundary: their number, weighted bytes kept, seconds and
    predecessors."""

    numbers: Ints
    kept: Floats
    seconds: Floats
    before: Ints
    """Boundary, label and point of each predecessor."""


class PieceCache:
    """The pieces of chains examined so far, by the seconds per byte of the link; equal chains share their pieces on any
    stage, and equal pieces share their points."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of_chain: dict[tuple[int, float], _Pieces] = {}
        self._at: dict[tuple[int, float, int, int], tuple[Point, ...]] = {}
        self._points: dict[tuple[object, ...], tuple[Point, ...]] = {}
        self._operators: dict[tuple[object, ...], int] = {}
        self._of_operators: dict[int, Ints] = {}
        """Numbers of the operators of a chain, equal for equal ones."""

    def of_chain(self, chain: Chain, link_s_per_byte: float) -> _Pieces:
        """Return all pieces of a chain that are tried."""
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
            numbers = np.cumsum([0, *(column.shape[1] for column in columns)])
            points = np.ascontiguousarray(np.concatenate(columns, axis=1) if columns else np.zeros((3, 0)))
            self._of_chain[key] = _Pieces(
                np.array(ends), np.array(starts, np.int64), np.array(transient, float), numbers, points
            )
        return self._of_chain[key]

    def points(self, chain: Chain, start: int, stop: int, link_s_per_byte: float) -> tuple[Point, ...]:
        """Return the points of the piece between two boundaries."""
        key = self._number(chain), link_s_per_byte, start, stop
        if key not in self._at:
            is_last, is_thorough = stop == len(chain.boundaries) - 1, stop - start <= _THOROUGH
            operators = self._operators_of(chain)[chain.boundaries[start] : chain.boundaries[stop]]
            alike = operators.tobytes(), is_last, is_thorough
            points = self._known(alike, lambda: network_of(chain, start, stop).points(is_thorough))
            if math.isfinite(link_s_per_byte):
                first, end = chain.boundaries[start], chain.boundaries[stop]
                spare_s = chain.spare_s(first, end)
                moved = (*alike, link_s_per_byte, spare_s)
                points = self._known(
                    moved, lambda: network_of(chain, start, stop).with_moves(points, link_s_per_byte, spare_s)
                )
            self._at[key] = points
        return self._at[key]

    def _operators_of(self, chain: Chain) -> Ints:
        """Return the numbers of the operators of a chain."""
        key = self._number(chain)
        if key not in self._of_operators:
            numbers = [self._operators.setdefault(same, len(self._operators)) for same in chain.relative]
            self._of_operators[key] = np.array(numbers, np.int64)
        return self._of_operators[key]

    def _known(
        self, signature: tuple[object, ...], points: Callable[[], tuple[Point, ...]]
    ) -> tuple[Point, ...]:
        if signature not in self._points:
            self._points[signature] = points()
        return self._points[signature]

    def _number(self, chain: Chain) -> int:
        return self._numbers.setdefault(chain.shape, len(self._numbers))

    def _columns(self, chain: Chain, start: int, stop: int, link_s_per_byte: float) -> Floats:
        """Return seconds, kept bytes and work bytes of the points of a piece, one row each."""
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
    """Return the network of the piece between two boundaries."""
    ends = chain.boundaries
    return PieceNetwork(chain, ends[start], ends[stop], stop == len(ends) - 1)


@dataclass
class RankChain:
    """The chains of the stages of one rank; `copies[i]` sets of the values saved by stage `i` are alive at the peak.

    While the backward of a stage is at a piece, the set in use has the values kept before the piece and in it, and every
    other set has all kept values; the recomputed values of the piece and the backward's own results are alive in addition.

    With a link to the host (`link_s_per_byte` is finite), a piece may offload what it keeps. The link is busy with it from
    its last use in the forward, for no longer than the piece takes, and not beyond the stage, where F waits for it. The
    backward has time for the copies back, except at its beginning, where recomputation waits for what it reads.

    Ignores: results of recomputed operators that no backward needs; that values kept by several pieces are counted for each;
    values fetched from the host before their piece; link time that other pieces leave unused.
    """

    chains: Sequence[Chain]
    copies: Sequence[float]
    pieces: PieceCache
    """Pieces examined so far; may be shared by ranks."""
    link_s_per_byte: float = math.inf

    @property
    def most_bytes(self) -> float:
        """Bytes at the peak if everything is kept."""
        return max(
            self._other_sets_bytes(index)
            + max(
                (
                    float(chain.needed_before[b]) + chain.transient(a, b)
                    for a, b in pairwise(chain.boundaries)
                ),
                default=0.0,
            )
            for index, chain in enumerate(self.chains)
        )

    def _other_sets_bytes(self, in_use: int) -> float:
        """Return the bytes of all sets but one of stage `in_use`, if everything is kept."""
        sets = [copies - (at == in_use) for at, copies in enumerate(self.copies)]
        if self._holds_one_set:
            sets = [float(at < in_use) for at in range(len(sets))]
        return sum(number * chain.needed_bytes for number, chain in zip(sets, self.chains, strict=True))

    def choose(self, limit: float) -> ChainChoice | None:
        """Return the fastest choice whose peak stays within `limit`, or None if none of those examined does."""
        if self._holds_one_set:
            return self._within(limit, limit)
        best: ChainChoice | None = None
        for reserve in self._reserves:
            choice = self._within(limit, limit - reserve)
            if best is not None and (choice is None or choice.seconds > best.seconds):
                break  # to reserve more only leaves less to keep
            best = choice or best
        return best

    @property
    def _holds_one_set(self) -> bool:
        """Whether only one microbatch has saved values at the peak, so that those of later pieces are freed already."""
        return all(copies <= 1 for copies in self.copies)

    @cached_property
    def _reserves(self) -> list[float]:
        """Bytes to reserve: from the peak of the backward's results to that with an interval fully recomputed."""
        least = most = 0.0
        for chain in self.chains:
            for stop, (first, last) in enumerate(pairwise(chain.boundaries), start=1):
                transient = chain.transient(first, last)
                work = max(point.work_bytes for point in self._points(chain, stop - 1, stop))
                least, most = max(least, transient), max(most, transient + work)
        return np.linspace(least, most, _RESERVES).tolist()

    def least(self) -> ChainChoice | None:
        """Return a choice with nearly the lowest peak."""
        low, high = 0.0, self.most_bytes
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._is_enough(middle):
                high = middle
            else:
                low = middle
        return self.choose(high)

    def _is_enough(self, limit: float) -> bool:
        """Return whether a choice stays within `limit`."""
        if self._holds_one_set:
            return self._within(limit, limit) is not None
        return any(self._within(limit, limit - reserve) is not None for reserve in reversed(self._reserves))

    def _within(self, limit: float, kept_limit: float) -> ChainChoice | None:
        """Return the fastest choice that keeps at most `kept_limit` bytes in all sets."""
        alone = len(self.chains) == 1 or self._holds_one_set
        share = (self.copies[0] - 1) / self.copies[0] if alone else 1.0
        reserved = share * kept_limit
        kept, seconds = np.zeros(1), np.zeros(1)
        tables: list[_Labels] = []
        for index in range(len(self.chains)):
            pieces = self.pieces.of_chain(self.chains[index], self.link_s_per_byte)
            weight = float(self.copies[index])
            table = _partial_choices(pieces, kept, seconds, weight, limit - reserved, kept_limit, alone)
            number = int(table.numbers[-1])
            if not number:
                return None
            tables.append(table)
            kept, seconds = table.kept[-1, :number], table.seconds[-1, :number]
        return self._traced(tables, int(np.argmin(seconds)))

    def _traced(self, tables: Sequence[_Labels], label: int) -> ChainChoice:
        """Return the choice that ends in `label` of the last boundary."""
        recomputed: list[set[int]] = [set() for _ in self.chains]
        moved = set[tuple[int, int]]()
        seconds = float(tables[-1].seconds[-1, label])
        for index in range(len(self.chains) - 1, -1, -1):
            chain, at = self.chains[index], len(self.chains[index].boundaries) - 1
            while at > 0:
                start, previous, number = tables[index].before[at, label].tolist()
                first = chain.boundaries[start]
                point = self._points(chain, start, at)[number]
                recomputed[index].update(first + operator for operator in point.ran)
                moved.update(
                    (chain.stage, chain.nodes[operator].id) for operator in _moved(chain, start, at, point)
                )
                at, label = start, previous
        ran, checkpoints = set[tuple[int, int]](), set[tuple[int, int]]()
        for chain, numbers in zip(self.chains, recomputed, strict=True):
            inputs = {chain.storages[root] for number in numbers for root in chain.uses[number]}
            kept = {
                storage.maker for storage in inputs if storage.maker not in numbers and not storage.needed
            }
            ran |= {(chain.stage, chain.nodes[number].id) for number in numbers}
            checkpoints |= {(chain.stage, chain.nodes[number].id) for number in kept}
        return ChainChoice(frozenset(ran), frozenset(checkpoints), frozenset(moved - ran), seconds)

    def _points(self, chain: Chain, start: int, stop: int) -> tuple[Point, ...]:
        return self.pieces.points(chain, start, stop, self.link_s_per_byte)


def _moved(chain: Chain, start: int, stop: int, point: Point) -> list[int]:
    """Return the numbers of the operators whose storages a point of a piece offloads."""
    first, roots = chain.boundaries[start], list[int]()
    if any(number < 0 for number in point.moved):
        roots = list(network_of(chain, start, stop).outside)
    return [
        first + number if number >= 0 else chain.storages[roots[-1 - number]].maker for number in point.moved
    ]


@compiled
def _partial_choices(
    pieces: _Pieces,
    first_kept: Floats,
    first_seconds: Floats,
    weight: float,
    headroom: float,
    kept_limit: float,
    alone: bool,
) -> _Labels:
    """Return the labels of every boundary, starting from those of the first."""
    ends, starts, first_point, points = pieces.ends, pieces.starts, pieces.first_point, pieces.points
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
        new_kept, new_seconds, origin = np.empty(most), np.empty(most), np.empty(most, np.int64)
        count = 0
        for piece in range(ends[stop], ends[stop + 1]):
            start = starts[piece]
            for point in range(first_point[piece], first_point[piece + 1]):
                more, more_s = weight * points[1, point], points[0, point]
                rest = headroom - points[2, point] - pieces.transient[piece]
                if rest < 0:
                    continue
                most_kept = min(kept_limit, rest * weight) if alone else kept_limit
                for label in range(numbers[start]):
                    if kept[start, label] + more <= most_kept:
                        new_kept[count] = kept[start, label] + more
                        new_seconds[count] = seconds[start, label] + more_s
                        origin[count] = point * _MOST_LABELS + label
                        count += 1
        if count == 0:
            continue
        chosen = _thinned(new_kept[:count], new_seconds[:count])
        numbers[stop] = len(chosen)
        for to in range(len(chosen)):
            source = chosen[to]
            kept[stop, to], seconds[stop, to] = new_kept[source], new_seconds[source]
            point, label = divmod(origin[source], _MOST_LABELS)
            piece = ends[stop]
            while first_point[piece + 1] <= point:
                piece += 1
            before[stop, to, 0], before[stop, to, 1] = starts[piece], label
            before[stop, to, 2] = point - first_point[piece]
    return _Labels(numbers, kept, seconds, before)


@compiled
def _thinned(kept: Floats, seconds: Floats) -> Ints:
    """Return the labels that no other dominates; if there are too many, those that differ most in bytes."""
    if len(kept) > _BINS:
        order = _fastest_by_bytes(kept, seconds)
    else:  # Bytes are whole numbers: this is by bytes, and of equal bytes by seconds, in one pass.
        order = np.argsort(kept + seconds / (2 * seconds.max() + 1e-30))
    chosen = np.empty(len(order), np.int64)
    count, least = 0, np.inf
    for label in order:
        if count == 0 or seconds[label] < least * (1 - 1e-12):
            chosen[count] = label
            count += 1
        least = min(least, seconds[label])
    chosen = chosen[:count]
    if count <= _MOST_LABELS:
        return chosen
    spread = np.empty(_MOST_LABELS, np.int64)
    num_spread, place = 0, 0
    for wanted in np.linspace(kept[chosen[0]], kept[chosen[-1]], _MOST_LABELS):
        while place < count - 1 and kept[chosen[place]] < wanted:
            place += 1
        if num_spread == 0 or spread[num_spread - 1] != chosen[place]:
            spread[num_spread] = chosen[place]
            num_spread += 1
    return spread[:num_spread]


@compiled
def _fastest_by_bytes(kept: Floats, seconds: Floats) -> Ints:
    """Return the fastest of the labels that keep about equally many bytes, and the one that keeps least, by bytes."""
    low, high = kept.min(), kept.max()
    scale = (_BINS - 1) / max(high - low, 1.0)
    fastest = np.full(_BINS, -1, np.int64)
    least = 0
    for label in range(len(kept)):
        bin_ = int((kept[label] - low) * scale)
        rival = fastest[bin_]
        if rival < 0 or (seconds[label], kept[label]) < (seconds[rival], kept[rival]):
            fastest[bin_] = label
        if (kept[label], seconds[label]) < (kept[least], seconds[least]):
            least = label
    fastest[0] = least  # others in its bin are nearly as small
    count = 0
    for label in fastest:
        if label >= 0:
            fastest[count] = label
            count += 1
    return fastest[:count]
