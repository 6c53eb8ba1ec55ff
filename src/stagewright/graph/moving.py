"""Saved values that spend the time until the backward on the host: they leave inside F and come back inside the backward.

A storage starts to leave right behind the last operator of F that uses it, and to come back so many bytes ahead of its
first use. F lets go of it when its copy is made; so what is alive does not depend on how fast the link is. Where the link
is late the device waits, in front of `LEFT` or `ARRIVED`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from stagewright.graph.added import arrived, fetch, left, offload
from stagewright.graph.graph import Node


@dataclass(frozen=True)
class Parcel:
    """A storage that is moved, and those of its `values` that the backward uses.

    `handle` stands for the copy on the host, and takes no bytes of the device; `storage` is what it is copied back into.
    `offset`: bytes from the start of the storage to the first of `values`.
    """

    values: tuple[int, ...]
    handle: int
    storage: int
    offset: int
    num_bytes: int


def with_leaving(
    nodes: Sequence[Node], parcels: Sequence[Parcel], ahead: int, storage: Callable[[int], int]
) -> list[Node]:
    """`nodes` of F, from which `parcels` leave as soon as they can; all have left at the end.

    At most `ahead` bytes are on their way at once, of a larger parcel that parcel alone. `storage` tells that of a value.
    """
    last = {storage(parcel.values[0]): -1 for parcel in parcels}
    for index, node in enumerate(nodes):
        for value in (*node.inputs, *node.outputs):
            if value is not None and (root := storage(value)) in last:
                last[root] = index
    leaving: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        leaving.setdefault(last[storage(parcel.values[0])], []).append(parcel)
    merged: list[Node] = []
    out: deque[Parcel] = deque()

    def settle(room: int) -> None:
        while out and sum(parcel.num_bytes for parcel in out) > room:
            parcel = out.popleft()
            merged.append(left(parcel.handle, parcel.values))

    for index in range(-1, len(nodes)):
        merged += [nodes[index]] if index >= 0 else []
        for parcel in leaving.get(index, ()):
            settle(max(ahead - parcel.num_bytes, 0))
            merged.append(offload(parcel.values, parcel.handle, parcel.offset, parcel.num_bytes))
            out.append(parcel)
    settle(-1)
    return merged


def with_returning(
    nodes: Sequence[Node], parcels: Sequence[Parcel], ahead: int, begun: Collection[int] = ()
) -> list[Node]:
    """`nodes` of a backward with those of `parcels` that they use, each back before its first use.

    At most `ahead` bytes that are not used yet are back or on their way; a larger parcel comes when it is used. What is
    among `begun`, storages, is on its way already.
    """
    parcel_of = {value: parcel for parcel in parcels for value in parcel.values}
    first: dict[Parcel, int] = {}
    used: set[int] = set()
    for index, node in enumerate(nodes):
        for value in node.inputs:
            if value in parcel_of:
                used.add(value)
                first.setdefault(parcel_of[value], index)
    order = list(first)
    merged: list[Node] = []
    coming: deque[Parcel] = deque()
    next_one = 0

    def start(room: int) -> Iterator[Node]:
        nonlocal next_one
        while next_one < len(order):
            parcel = order[next_one]
            if sum(one.num_bytes for one in (*coming, parcel)) > room:
                return
            coming.append(parcel)
            next_one += 1
            if parcel.storage not in begun:
                yield fetch(parcel.handle, parcel.storage)

    merged += start(ahead)
    place = 0
    for index, node in enumerate(nodes):
        while place < len(order) and first[order[place]] == index:
            parcel = order[place]
            if not coming:
                merged += start(parcel.num_bytes)
            coming.popleft()
            merged.append(_arrived(parcel, used))
            merged += start(ahead)
            place += 1
        merged.append(node)
    return merged


def _arrived(parcel: Parcel, used: Collection[int]) -> Node:
    places = tuple(place for place, value in enumerate(parcel.values) if value in used)
    return arrived(parcel.handle, parcel.storage, tuple(parcel.values[place] for place in places), places)
