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
from itertools import accumulate

import numpy as np

from stagewright.arrays import Bools, Floats, Ints
from stagewright.compiled import compiled
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
        self.last: list[int] = []
        """The operator of the piece that uses each storage last."""
        self.kept: list[bool] = []
        """Whether the next boundary keeps each storage, because the backward needs it."""
        for number in local:
            for root in chain.outputs[number]:
                storage = chain.storages[root]
                roots[root] = len(self.maker)
                self.maker.append(number - start)
                self.bytes.append(storage.num_bytes)
                self.needed.append(storage.needed)
                self.last.append(min(storage.last, stop - 1) - start)
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

    def with_moves(
        self, points: Sequence[Point], link_s_per_byte: float, spare_s: float
    ) -> tuple[Point, ...]:
        """Return the undominated of `points` and others, of which kept values are offloaded to the host; the link has
        `spare_s` after the forward of the piece for copies that have not ended by then."""
        moved = [other for point in points for other in self._moved(point, link_s_per_byte, spare_s)]
        return _undominated([*points, *moved])

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

    def _moved(self, point: Point, link_s_per_byte: float, spare_s: float) -> Iterable[Point]:
        """Yield `point` with as many kept bytes offloaded as the link moves meanwhile, the largest first, with and without
        what recomputation reads, which waits for it; and with all of them offloaded."""
        sizes, begins, read = self._movable(point)
        piece_s = sum(self.seconds)

        def late_s(moved: Iterable[int]) -> float:
            """Return for how long the copies of what is moved cannot be hidden."""
            end = busy = 0.0
            for number in sorted(moved, key=begins.__getitem__):
                seconds = sizes[number] * link_s_per_byte
                end, busy = max(end, begins[number]) + seconds, busy + seconds
            return max(0.0, busy - piece_s, end - piece_s - spare_s)

        def hidden(numbers: Iterable[int]) -> tuple[int, ...]:
            chosen: list[int] = []
            for number in sorted(numbers, key=lambda number: (-sizes[number], number)):
                if late_s([*chosen, number]) <= 0:
                    chosen.append(number)
            return tuple(sorted(chosen))

        for moved in dict.fromkeys((hidden(sizes.keys() - read), hidden(sizes), tuple(sorted(sizes)))):
            num_bytes = float(sum(map(sizes.__getitem__, moved)))
            read_s = sum(sizes[number] for number in read.intersection(moved)) * link_s_per_byte
            read_s = max(0.0, read_s - 2 * spare_s)
            yield Point(
                point.seconds + late_s(moved) + read_s, point.kept_bytes - num_bytes, point.work_bytes + num_bytes,
                point.ran, moved, num_bytes,
            )  # fmt: skip

    def _movable(self, point: Point) -> tuple[dict[int, int], dict[int, float], set[int]]:
        """Return what may be offloaded, numbered as in `Point.moved`: bytes, the seconds of the piece after which the copy
        begins, and what recomputation reads."""
        recomputed = set(point.ran)
        taken = {root for number in point.ran for root in self.uses[number]}
        sizes: dict[int, int] = {}
        begins: dict[int, float] = {}
        read: set[int] = set()
        done_s = [*accumulate(self.seconds)]
        for root, maker in enumerate(self.maker):
            if maker not in recomputed and (self.needed[root] or root in taken):
                sizes[maker] = sizes.get(maker, 0) + self.bytes[root]
                begins[maker] = max(begins.get(maker, 0.0), done_s[self.last[root]])
                if root in taken:
                    read.add(maker)
        for root in {root for number in point.ran for root in self.takes[number]}:
            sizes[-1 - root], begins[-1 - root] = self.outside_bytes[root], 0.0
            read.add(-1 - root)
        return sizes, begins, read

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
        first_root = 2
        first_op = first_root + len(self.maker)
        first_outside = first_op + len(self.seconds)
        network = _Network(
            first_op, first_outside, first_outside + len(self.outside_bytes), sum(self.seconds)
        )
        for root, maker in enumerate(self.maker):
            if self.kept[root]:
                continue
            if self.needed[root]:
                network.edge(_SOURCE, first_root + root)
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


_SOURCE, _SINK = 0, 1


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
    def _edges(self) -> tuple[Ints, Ints, Floats, Floats]:
        """Starts and ends of the edges, with the fixed and the priced part of their capacities."""
        starts, ends = np.array(list(self.ends), np.int64).T
        fixed, priced = np.array(list(self.ends.values()), float).T
        return starts.copy(), ends.copy(), fixed.copy(), priced.copy()

    def cut(self, price: float) -> tuple[int, ...]:
        """Return the operators on the source's side of the minimum cut if a byte is worth `price` seconds."""
        if not any(start == _SOURCE for start, _ in self.ends):
            return ()
        starts, ends, fixed, priced = self._edges
        worth = np.minimum(np.rint(price * self.scale * priced), _INFINITE // 4)
        capacities = np.rint(np.minimum(fixed + worth, _INFINITE)).astype(np.int64)
        reached = _reached(self.size, starts, ends, capacities)
        return tuple(np.flatnonzero(reached[self.first_op : self.after_ops]).tolist())


@compiled
def _reached(size: int, starts: Ints, ends: Ints, capacities: Ints) -> Bools:
    """Return for every node whether it is on the side of `_SOURCE` of the smallest minimum cut.

    Source: Dinic 1970, maximum flow along shortest paths with room left, one layered network after the other.
    """
    number = len(starts)
    to, room = np.empty(2 * number, np.int64), np.zeros(2 * number, np.int64)
    following, first = np.empty(2 * number, np.int64), np.full(size, -1)
    for edge in range(number):  # edge 2i, and 2i + 1 back
        to[2 * edge], to[2 * edge + 1] = ends[edge], starts[edge]
        room[2 * edge] = capacities[edge]
        following[2 * edge], first[starts[edge]] = first[starts[edge]], 2 * edge
        following[2 * edge + 1], first[ends[edge]] = first[ends[edge]], 2 * edge + 1
    level, queue, path = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    while True:
        level[:] = -1
        level[_SOURCE], queue[0], count = 0, _SOURCE, 1
        place = 0
        while place < count:
            node = queue[place]
            place += 1
            edge = first[node]
            while edge >= 0:
                if room[edge] > 0 and level[to[edge]] < 0:
                    level[to[edge]] = level[node] + 1
                    queue[count] = to[edge]
                    count += 1
                edge = following[edge]
        if level[_SINK] < 0:
            return level >= 0
        current = first.copy()
        node, length = _SOURCE, 0
        while True:
            if node == _SINK:
                least = room[path[0]]
                for step in range(1, length):
                    least = min(least, room[path[step]])
                full = 0
                for step in range(length - 1, -1, -1):
                    room[path[step]] -= least
                    room[path[step] ^ 1] += least
                    if room[path[step]] == 0:
                        full = step
                length, node = full, to[path[full] ^ 1]
            edge = current[node]
            while edge >= 0 and not (room[edge] > 0 and level[to[edge]] == level[node] + 1):
                edge = following[edge]
            current[node] = edge
            if edge >= 0:
                path[length] = edge
                length += 1
                node = to[edge]
            elif length:
                level[node] = -1
                length -= 1
                node = to[path[length] ^ 1]
            else:
                break


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
