"""Offloading of saved values to the host inside F, and fetching inside the backward.

The copy of a storage to the host starts right after the last operator of F that uses it; the copy back starts a given number
of bytes ahead of its first use. F frees the storage when the copy has ended, so memory does not depend on the speed of the
link. Where the link is late, the device waits before `OFFLOADED` or `FETCHED`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from stagewright.graph.added_nodes import fetch, fetched, offload, offloaded
from stagewright.graph.graph import Node


@dataclass(frozen=True)
class OffloadedStorage:
    """A storage that is offloaded, and those of its `values` that the backward uses.

    `handle` stands for the copy on the host, and takes no memory of the device; `storage` is the copy back on the device.
    `offset`: bytes from the start of the storage to the first of `values`.
    """

    values: tuple[int, ...]
    handle: int
    storage: int
    offset: int
    num_bytes: int


def with_offloads(
    nodes: Sequence[Node], parcels: Sequence[OffloadedStorage], ahead: int, storage: Callable[[int], int]
) -> list[Node]:
    """Return `nodes` of F with offloads of `parcels`, each as early as possible; all have ended at the end.

    At most `ahead` bytes are being copied at once, or one larger parcel alone. `storage` returns the storage of a value.
    """
    if not parcels:
        return list(nodes)
    last = {storage(parcel.values[0]): -1 for parcel in parcels}
    for index, node in enumerate(nodes):
        for value in (*node.inputs, *node.outputs):
            if value is not None and (root := storage(value)) in last:
                last[root] = index
    by_index: dict[int, list[OffloadedStorage]] = {}
    for parcel in parcels:
        by_index.setdefault(last[storage(parcel.values[0])], []).append(parcel)
    merged: list[Node] = []
    out: deque[OffloadedStorage] = deque()

    def settle(limit: int) -> None:
        while out and sum(parcel.num_bytes for parcel in out) > limit:
            parcel = out.popleft()
            merged.append(offloaded(parcel.handle, parcel.values))

    for index in range(-1, len(nodes)):
        merged += [nodes[index]] if index >= 0 else []
        for parcel in by_index.get(index, ()):
            settle(max(ahead - parcel.num_bytes, 0))
            merged.append(offload(parcel.values, parcel.handle, parcel.offset, parcel.num_bytes))
            out.append(parcel)
    settle(-1)
    return merged


def with_fetches(
    nodes: Sequence[Node], parcels: Sequence[OffloadedStorage], ahead: int, begun: Collection[int] = ()
) -> list[Node]:
    """Return `nodes` of a backward with fetches of those `parcels` that they use, each before its first use.

    At most `ahead` bytes are fetched or being fetched and not used yet; a larger parcel is fetched when it is used. The
    fetches of the storages `begun` have started before.
    """
    if not parcels:
        return list(nodes)
    parcel_of = {value: parcel for parcel in parcels for value in parcel.values}
    first: dict[OffloadedStorage, int] = {}
    used: set[int] = set()
    for index, node in enumerate(nodes):
        for value in node.inputs:
            if value in parcel_of:
                used.add(value)
                first.setdefault(parcel_of[value], index)
    order = list(first)
    merged: list[Node] = []
    coming: deque[OffloadedStorage] = deque()
    next_one = 0

    def start(limit: int) -> Iterator[Node]:
        nonlocal next_one
        while next_one < len(order):
            parcel = order[next_one]
            if sum(waiting.num_bytes for waiting in (*coming, parcel)) > limit:
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
            merged.append(_fetched(parcel, used))
            merged += start(ahead)
            place += 1
        merged.append(node)
    return merged


def _fetched(parcel: OffloadedStorage, used: Collection[int]) -> Node:
    places = tuple(place for place, value in enumerate(parcel.values) if value in used)
    return fetched(parcel.handle, parcel.storage, tuple(parcel.values[place] for place in places), places)
