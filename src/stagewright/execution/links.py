"""Measurement of links between ranks, pair by pair, and of collectives by size; every rank of the group takes part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import torch
import torch.distributed as dist

from stagewright.execution.clock import synchronize
from stagewright.execution.collectives import all_gather, is_ordered, reduce_scatter
from stagewright.execution.probe_measurements import linear_fit, seconds_together
from stagewright.units import KIB, MIB

Pair = tuple[int, int]
Progress = Callable[[str, float], None]

MESSAGE_BYTES = (4, 64 * KIB, MIB, 4 * MIB, 16 * MIB)
COLLECTIVE_BYTES = (4 * KIB, 64 * KIB, MIB, 4 * MIB)
_LONGEST_S = 0.1
"""Seconds of a message or collective beyond which no larger size is tried."""
_MOST_REPEATS = 50
_FITTED = 2
"""Number of largest sizes over which the bandwidth is fitted: in small ones, buffers and token buckets hide it."""


def rounds(nodes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return all pairs of ranks in rounds that use no node twice, so that no two pairs of a round share an adapter.

    Pairs inside nodes come first, all nodes at once; then pairs of nodes in the rounds of a tournament.

    >>> rounds([[0, 1], [2, 3]])
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 3)], [(1, 2)], [(1, 3)]]
    >>> [sorted(pairs) for pairs in rounds([[0], [1], [2], [3]])]
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    inside = [list(combinations(ranks, 2)) for ranks in nodes]
    ordered = _in_turn(inside)
    for matches in _tournament(len(nodes)):
        ordered += _in_turn([list(product(nodes[a], nodes[b])) for a, b in matches])
    return ordered


def _in_turn(lists: list[list[Pair]]) -> list[list[Pair]]:
    """Return the first pair of every list, then the second of every list that has one, and so on."""
    longest = max(map(len, lists), default=0)
    return [[pairs[turn] for pairs in lists if turn < len(pairs)] for turn in range(longest)]


def _tournament(count: int) -> list[list[Pair]]:
    """Return rounds in which each of `count` players meets every other once (the circle method)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    turns = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return turns


@dataclass(frozen=True)
class LinkCurve:
    """Measured (bytes, seconds) of messages from `sender` to `receiver`, each with an empty answer."""

    sender: int
    receiver: int
    points: tuple[tuple[float, float], ...]

    @property
    def latency_s(self) -> float:
        """Half of the round trip of the smallest message, in seconds: two hosts' clocks cannot separate the directions."""
        return self.points[0][1] / 2

    @property
    def bandwidth(self) -> float:
        """Bytes/s of this direction."""
        sizes, seconds = zip(*self.points[1:][-_FITTED:], strict=True)
        return linear_fit(sizes, seconds)[0]


def measure_links(
    nodes: Sequence[Sequence[int]],
    device: torch.device,
    seconds_per_size: float = 0.05,
    progress: Progress = lambda what, fraction: None,
) -> list[LinkCurve]:
    """Measure all pairs of ranks, both directions in turn; return the curves from this rank. Every rank must call this."""
    rank, curves = dist.get_rank(), []
    plan = rounds(nodes)
    for number, pairs in enumerate(plan):
        progress("links", number / len(plan))
        dist.barrier()
        for pair in pairs:
            if rank not in pair:
                continue
            with _connected(pair, device) as group:
                for sender, receiver in (pair, pair[::-1]):
                    if rank == sender:
                        points = _send_all(receiver, group, device, seconds_per_size)
                        curves.append(LinkCurve(sender, receiver, points))
                    else:
                        _receive_all(sender, group, device)
    return curves


@contextmanager
def _connected(pair: Pair, device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """Connect the ranks of `pair` with a message each way, so that later messages do not wait for a connection.

    Where messages match by order, the pair gets a separate group, which is destroyed at the end: NCCL creates a communicator
    for each pair of ranks in a group, in 0.1 to 0.3 s, and a communicator takes tens of MiB of both devices. With 64 ranks
    that would be 63 on each; this way there is one at a time.
    """
    group = None
    if is_ordered():
        # Local synchronization: otherwise all ranks would wait for each other at every pair.
        created = dist.new_group(list(pair), use_local_synchronization=True)
        group = created if isinstance(created, dist.ProcessGroup) else None
    empty = torch.zeros(1, dtype=torch.uint8, device=device)
    if dist.get_rank() == pair[0]:
        _round_trip(empty, pair[1], group)
    else:
        _answer(empty, torch.zeros_like(empty), pair[0], group)
    yield group
    if group is not None:
        synchronize(device)
        dist.destroy_process_group(group)


def _send_all(
    receiver: int, group: dist.ProcessGroup | None, device: torch.device, box_s: float
) -> tuple[tuple[float, float], ...]:
    """Time messages of growing size to `receiver`, which first receives the number of messages that follow."""
    points: list[tuple[float, float]] = []
    for size in MESSAGE_BYTES:
        go = len(points) <= _FITTED or points[-1][1] < _LONGEST_S
        _send_number(receiver, int(go), group, device)
        if not go:
            break
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        first = _round_trip(buffer, receiver, group)
        repeats = 0 if first > _LONGEST_S else max(3, min(_MOST_REPEATS, int(box_s / first)))
        _send_number(receiver, repeats, group, device)
        samples = [_round_trip(buffer, receiver, group) for _ in range(repeats)] or [first]
        points.append((float(size), _quick(samples)))
    return tuple(points)


def _receive_all(sender: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    for size in MESSAGE_BYTES:
        if not _receive_number(sender, group, device):
            return
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        _answer(buffer, answer, sender, group)
        for _ in range(_receive_number(sender, group, device)):
            _answer(buffer, answer, sender, group)


def _send_number(receiver: int, number: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    dist.send(torch.tensor([number], device=device), receiver, group)


def _receive_number(sender: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    number = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(number, sender, group)
    return int(number)


def _answer(buffer: torch.Tensor, answer: torch.Tensor, sender: int, group: dist.ProcessGroup | None) -> None:
    dist.recv(buffer, sender, group)
    dist.send(answer, sender, group)


def _round_trip(buffer: torch.Tensor, receiver: int, group: dist.ProcessGroup | None) -> float:
    answer = torch.empty(1, dtype=torch.uint8, device=buffer.device)
    synchronize(buffer.device)
    start = time.perf_counter()
    dist.send(buffer, receiver, group)
    dist.recv(answer, receiver, group)
    synchronize(buffer.device)
    return time.perf_counter() - start


def _quick(samples: list[float]) -> float:
    """Return the first quartile: a process often wakes late on a shared machine, which is no property of the link."""
    return sorted(samples)[len(samples) // 4]


# -- collectives ----------------------------------------------------------------------------------------------------


def measure_collectives(
    group: dist.ProcessGroup | None, device: torch.device, seconds_per_size: float = 0.1
) -> dict[str, list[tuple[float, float]]]:
    """Return, by operation, (bytes of the whole buffer, seconds) on the ranks of `group`; all of them must call this."""
    size = dist.get_world_size(group)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "all-reduce": lambda whole, shard: dist.all_reduce(whole, group=group),
        "all-gather": lambda whole, shard: all_gather(whole, shard, group=group),
        "reduce-scatter": lambda whole, shard: reduce_scatter(shard, whole, group=group),
    }
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, collective in calls.items():
        points = curves[name] = []
        for wanted in COLLECTIVE_BYTES:
            if points and points[-1][1] > _LONGEST_S:
                break
            part = -(-wanted // (4 * size))
            whole, shard = torch.zeros(part * size, device=device), torch.zeros(part, device=device)
            seconds = _timed(partial(collective, whole, shard), group, device, seconds_per_size)
            points.append((float(whole.numel() * whole.element_size()), seconds))
    return curves


def _timed(
    call: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device, box_s: float
) -> float:
    """Return the seconds until the last rank is done, the same on all ranks."""
    first = _slowest(seconds_together(call, device, group), group, device)
    repeats = max(2, min(_MOST_REPEATS, int(box_s / first)))
    samples = [seconds_together(call, device, group) for _ in range(repeats)]
    return _slowest(_quick(samples), group, device)


def _slowest(seconds: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)
