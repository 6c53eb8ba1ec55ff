"""Pieces of a chain: trade-offs of what to recompute between two boundaries, from nothing to everything.

What a piece recomputes is a closure: an operator is recomputed because the backward, or another recomputed operator, needs
its output, unless that is kept. For a price per byte the best set is a minimum cut of a small network, and each corner of
the lower hull of (bytes, seconds) takes one cut. Moving single operators to the other side fills in between.

Source: minimum cuts for recomputation as in PyTorch's partitioner (min-cut rematerialisation, torch._functorch); hulls by
prices as in Everett's multipliers, Operations Research 11, 1963.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stagewright.arrays import Floats
from stagewright.planning.checkpointing.chain import Chain

_SCALE = 10_000_000
"""Flow that stands for all seconds of a piece."""
_INFINITE = 1 << 30
_MOST_HULL = 16
"""Maximum number of corners of a hull."""
_MOST_FLIPPED = 40
"""Maximum number of operators of a piece for which single ones are moved to the other side."""


@dataclass(frozen=True, slots=True)
class Point:
    """A choice of what to recompute and offload in a piece: `ran` are its recomputed operators, counted from its first.

    `seconds` are added to every microbatch; `kept_bytes` stay from F to the backward, `work_bytes` are alive at once while
    the backward is at the piece, because they are recomputed or fetched from the host. `moved` are the operators whose kept
    storages, of `moved_bytes`, are offloaded: counted as `ran` is, or by the numbers of storages from before the piece, -1
    for the first.
    """

    seconds: float
    kept_bytes: float
    work_bytes: float
    ran: tuple[int, ...]
    moved: tuple[int, ...] = ()
    moved_bytes: float = 0.0


class PieceNetwork:
    """The operators ``[start, stop)`` of a chain; the boundary before them is kept where they are recomputed from it."""

    def __init__(self, chain: Chain, start: int, stop: int, is_last: bool) -> None:
        self.seconds = chain.seconds[start:stop]
        local = range(start, stop)
        roots: dict[int, int] = {}
        self.maker: list[int] = []
        self.bytes: list[int] = []
        self.needed: list[bool] = []
        self.kept: list[bool] = []
        """Whether the next boundary keeps each storage, because the backward needs it."""
        for number in local:
            for root in chain.outputs[number]:
                storage = chain.storages[root]
                roots[root] = len(self.maker)
                self.maker.append(number - start)
                self.bytes.append(storage.num_bytes)
                self.needed.append(storage.needed)
                self.kept.append(storage.needed and storage.last >= stop and not is_last)
        outside: dict[int, int] = {}
        self.outside = outside
        """Root -> number of storages from before the piece."""
        self.outside_bytes: list[int] = []
        self.uses: list[tuple[int, ...]] = []
        """Per operator, the storages allocated in the piece that it reads."""
        self.takes: list[tuple[int, ...]] = []
        """Per operator, the storages from before the piece that it reads and that are kept only for recomputation."""
        for number in local:
            inside = tuple(roots[root] for root in chain.uses[number] if root in roots)
            self.uses.append(inside)
            taken: list[int] = []
            for root in chain.uses[number]:
                if root not in roots and not chain.storages[root].needed:
                    if root not in outside:
                        outside[root] = len(self.outside_bytes)
                        self.outside_bytes.append(chain.storages[root].num_bytes)
                    taken.append(outside[root])
            self.takes.append(tuple(taken))

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for pieces with the same points."""
        return (
            self.seconds, tuple(self.maker), tuple(self.bytes), tuple(self.needed), tuple(self.kept),
            tuple(self.uses), tuple(self.takes), tuple(self.outside_bytes),
        )  # fmt: skip

    def corners(self) -> tuple[Point, ...]:
        """Return the corners of the lower hull of (bytes, seconds), from all kept to everything recomputed."""
        points = _undominated(self._hull(_MOST_HULL))
        hull: list[Point] = []
        for point in points:
            if hull and point.kept_bytes >= hull[-1].kept_bytes:
                continue
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        return tuple(hull)

    def points(self, thorough: bool) -> tuple[Point, ...]:
        """Return the undominated points from all kept to everything recomputed."""
        corners = self._hull(_MOST_HULL if thorough else _MOST_HULL // 2)
        by_operators = {point.ran: point for point in corners}
        if thorough and len(self.seconds) <= _MOST_FLIPPED:
            for point in corners:
                for ran in self._flipped(frozenset(point.ran)):
                    if ran not in by_operators:
                        by_operators[ran] = self._point(ran)
        return _undominated(by_operators.values())

    def with_moves(self, points: Sequence[Point], link_s_per_byte: float) -> tuple[Point, ...]:
        """Return the undominated of `points` and others, of which kept values are offloaded to the host."""
        return _undominated(
            [*points, *(moved for point in points for moved in self._moved(point, link_s_per_byte))]
        )

    # -- inner ------------------------------------------------------------------------------------------------------

    def _closure(self, wanted: Iterable[int], kept: frozenset[int]) -> frozenset[int]:
        """Return the operators to recompute for the storages `wanted`, from the storages `kept` and the boundary."""
        ran: set[int] = set()
        stack = [self.maker[root] for root in wanted]
        while stack:
            number = stack.pop()
            if number not in ran:
                ran.add(number)
                stack += [self.maker[root] for root in self.uses[number] if root not in kept]
        return frozenset(ran)

    def _point(self, ran: tuple[int, ...]) -> Point:
        recomputed = set(ran)
        taken = {root for number in ran for root in self.uses[number]}
        outside = {root for number in ran for root in self.takes[number]}
        kept = work = 0
        for root, maker in enumerate(self.maker):
            if maker in recomputed:
                work += self.bytes[root] if self.needed[root] else 0
            elif self.needed[root] or root in taken:
                kept += self.bytes[root]
        kept += sum(self.outside_bytes[root] for root in outside)
        return Point(sum(self.seconds[number] for number in ran), float(kept), float(work), ran)

    def _moved(self, point: Point, link_s_per_byte: float) -> Iterable[Point]:
        """Yield `point` with as many kept bytes offloaded as the link moves while the forward is at the piece, the largest
        first, and with all of them offloaded."""
        recomputed = set(point.ran)
        taken = {root for number in point.ran for root in self.uses[number]}
        sizes: dict[int, int] = {}
        for root, maker in enumerate(self.maker):
            if maker not in recomputed and (self.needed[root] or root in taken):
                sizes[maker] = sizes.get(maker, 0) + self.bytes[root]
        for root in {root for number in point.ran for root in self.takes[number]}:
            sizes[-1 - root] = self.outside_bytes[root]
        free = sum(self.seconds)
        hidden: list[int] = []
        for number in sorted(sizes, key=lambda number: (-sizes[number], number)):
            if (sum(map(sizes.__getitem__, hidden)) + sizes[number]) * link_s_per_byte <= free:
                hidden.append(number)
        for moved in dict.fromkeys((tuple(sorted(hidden)), tuple(sorted(sizes)))):
            num_bytes = float(sum(map(sizes.__getitem__, moved)))
            late = max(0.0, num_bytes * link_s_per_byte - free)
            yield Point(
                point.seconds + late, point.kept_bytes - num_bytes, point.work_bytes + num_bytes, point.ran,
                moved, num_bytes,
            )  # fmt: skip

    def _flipped(self, ran: frozenset[int]) -> Iterable[tuple[int, ...]]:
        """Yield the recomputed operators if one storage more or one less than with `ran` is kept."""
        wanted = {r for r, maker in enumerate(self.maker) if maker in ran and self.needed[r]}
        free = frozenset(r for r, maker in enumerate(self.maker) if maker not in ran)
        for root, maker in enumerate(self.maker):
            if self.kept[root]:
                continue
            same = {other for other, other_maker in enumerate(self.maker) if other_maker == maker}
            if maker in ran:
                changed = self._closure(wanted - same, free | same)
            elif self.needed[root]:
                changed = self._closure(wanted | {root}, free - same)
            else:
                changed = self._closure(wanted, free - same)
            yield tuple(sorted(changed))

    def _hull(self, most: int) -> list[Point]:
        keeps = self._point(())
        least = self._point(self._cut(None))
        by_operators = {point.ran: point for point in (keeps, least)}
        pending = [(keeps, least)]
        while pending and len(by_operators) < most:
            smaller_s, larger_s = pending.pop(0)
            gain, cost = smaller_s.kept_bytes - larger_s.kept_bytes, larger_s.seconds - smaller_s.seconds
            if gain <= 0 or cost <= 0:
                continue
            middle = self._point(self._cut(cost / gain))
            if middle.ran not in by_operators:
                by_operators[middle.ran] = middle
                pending += [(smaller_s, middle), (middle, larger_s)]
        return list(by_operators.values())

    def _cut(self, price: float | None) -> tuple[int, ...]:
        """Return the operators to recompute if freeing a byte is worth `price` seconds; None: more than anything."""
        if price is None:
            wanted = [r for r in range(len(self.maker)) if self.needed[r] and not self.kept[r]]
            return tuple(
                sorted(self._closure(wanted, frozenset(r for r in range(len(self.maker)) if self.kept[r])))
            )
        return self._network.cut(price)

    @cached_property
    def _network(self) -> _Network:
        source, first_root = 0, 2
        first_op = first_root + len(self.maker)
        first_outside = first_op + len(self.seconds)
        network = _Network(
            first_op, first_outside, first_outside + len(self.outside_bytes), sum(self.seconds)
        )
        for root, maker in enumerate(self.maker):
            if self.kept[root]:
                continue
            if self.needed[root]:
                network.edge(source, first_root + root)
            network.edge(first_root + root, first_op + maker, num_bytes=self.bytes[root])
        for number, seconds in enumerate(self.seconds):
            network.edge(first_op + number, _SINK, seconds=seconds)
            for root in self.uses[number]:
                if not self.kept[root]:
                    network.edge(first_op + number, first_root + root)
            for root in self.takes[number]:
                network.edge(first_op + number, first_outside + root)
        for root, num_bytes in enumerate(self.outside_bytes):
            network.edge(first_outside + root, _SINK, num_bytes=num_bytes)
        return network


_SINK = 1


class _Network:
    """A piece's flow network, with edges of seconds, edges of bytes that have a price, and edges that cannot be cut."""

    def __init__(self, first_op: int, after_ops: int, size: int, seconds: float) -> None:
        self.first_op = first_op
        self.after_ops = after_ops
        self.size = size
        self.scale = _SCALE / max(seconds, 1e-12)
        self.ends: dict[tuple[int, int], tuple[float, float]] = {}

    def edge(
        self, start: int, stop: int, seconds: float | None = None, num_bytes: float | None = None
    ) -> None:
        fixed = 0.0 if seconds is None else seconds * self.scale
        self.ends[start, stop] = (
            (_INFINITE, 0.0) if seconds is None and num_bytes is None else (fixed, num_bytes or 0.0)
        )

    @cached_property
    def _sorted(self) -> tuple[Any, Floats, Floats]:
        """The edges as a sparse matrix, with the fixed and the priced part of its entries."""
        from scipy.sparse import csr_array

        rows, columns = np.array(list(self.ends), np.int32).T
        numbers = np.arange(1, len(self.ends) + 1, dtype=np.int32)
        matrix = csr_array((numbers, (rows, columns)), shape=(self.size, self.size))
        matrix.sort_indices()
        order = np.asarray(matrix.data, np.int64) - 1
        weights = np.array(list(self.ends.values()))[order]
        return matrix, weights[:, 0], weights[:, 1]

    def cut(self, price: float) -> tuple[int, ...]:
        """Return the operators on the source's side of the minimum cut if a byte is worth `price` seconds."""
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not any(start == 0 for start, _ in self.ends):
            return ()
        matrix, fixed, priced = self._sorted
        worth = np.minimum(np.rint(price * self.scale * priced), _INFINITE // 4)
        capacity = matrix.copy()
        capacity.data = np.rint(np.minimum(fixed + worth, _INFINITE)).astype(np.int32)
        residual = capacity - maximum_flow(capacity, 0, _SINK).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, 0, return_predecessors=False)
        places = np.sort(np.asarray(reached, np.int64)) - self.first_op
        return tuple(place for place in places.tolist() if 0 <= place < self.after_ops - self.first_op)


def _is_above(first: Point, middle: Point, last: Point) -> bool:
    """Return whether `middle` lies on or above the line between the others."""
    gain, cost = first.kept_bytes - last.kept_bytes, last.seconds - first.seconds
    return (middle.seconds - first.seconds) * gain >= (first.kept_bytes - middle.kept_bytes) * cost


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points, by seconds, without those for which another is no slower, keeps no more and has no more work."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.kept_bytes, p.work_bytes)):
        if not any(p.kept_bytes <= point.kept_bytes and p.work_bytes <= point.work_bytes for p in kept):
            kept.append(point)
    return tuple(kept)
