"""Compiled parts of assignment: the cost of an order, the five moves, annealing, descent, exhaustion."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_MOVES = 5
_TIE = 1e-3
"""Weight of means beside maxima, so that a search sees progress where the slowest stays the same."""


@njit(cache=True)
def cost(
    order: Ints,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> float:
    """Seconds: the slowest pipeline, the busiest unit, the slowest ring."""
    through = longest = slowest = 0.0
    for replica in range(num_replicas):
        total = 0.0
        first = replica * num_stages
        for stage in range(num_stages):
            unit = order[first + stage]
            total += fill[unit, stage]
            longest = max(longest, busy[unit, stage])
            if stage + 1 < num_stages:
                total += hop[unit, order[first + stage + 1]]
            if num_replicas > 1:
                follower = order[((replica + 1) % num_replicas) * num_stages + stage]
                slowest = max(slowest, share[stage] * ring[unit, follower])
        through = max(through, total)
    return through + longest + slowest


@njit(cache=True)
def guided(
    order: Ints,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> float:
    """`cost` with a trace of the means of what it takes the maxima of."""
    through = longest = slowest = 0.0
    sum_through = sum_ring = 0.0
    for replica in range(num_replicas):
        total = 0.0
        first = replica * num_stages
        for stage in range(num_stages):
            unit = order[first + stage]
            total += fill[unit, stage]
            longest = max(longest, busy[unit, stage])
            if stage + 1 < num_stages:
                total += hop[unit, order[first + stage + 1]]
            if num_replicas > 1:
                follower = order[((replica + 1) % num_replicas) * num_stages + stage]
                edge = share[stage] * ring[unit, follower]
                slowest = max(slowest, edge)
                sum_ring += edge
        sum_through += total
        through = max(through, total)
    mean = sum_through / num_replicas + sum_ring / (num_replicas * num_stages)
    return through + longest + slowest + _TIE * mean


@njit(cache=True)
def move(order: Ints, kind: int, a: int, b: int, to: int, out: Ints) -> None:
    """One of five moves of `order` into `out`: reverse a..b, insert, swap, move a..b, move a..b reversed."""
    size = len(order)
    if kind == 2:
        out[:] = order
        out[a], out[b] = order[b], order[a]
        return
    low, high = min(a, b), max(a, b)
    if kind == 0:
        out[:] = order
        for i in range(high - low + 1):
            out[low + i] = order[high - i]
        return
    if kind == 1:
        low, high = a, a
    length = high - low + 1
    rest = size - length
    place = to % (rest + 1)
    index = 0
    for i in range(rest + 1):
        if i == place:
            for j in range(length):
                out[index] = order[high - j] if kind == 4 else order[low + j]
                index += 1
        if i < rest:
            out[index] = order[i] if i < low else order[i + length]
            index += 1


@njit(cache=True)
def anneal(
    start: Ints,
    num_steps: int,
    hot: float,
    cold: float,
    seed: int,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> Ints:
    """The best order seen in `num_steps` moves while the temperature falls from `hot` to `cold` seconds."""
    np.random.seed(seed)
    order, trial = start.copy(), start.copy()
    now = guided(order, num_replicas, num_stages, hop, ring, share, fill, busy)
    best, least = order.copy(), now
    size = len(order)
    rate = (cold / hot) ** (1.0 / num_steps)
    temperature = hot
    for _ in range(num_steps):
        a, b = np.random.randint(size), np.random.randint(size)
        move(order, np.random.randint(NUM_MOVES), a, b, np.random.randint(size), trial)
        found = guided(trial, num_replicas, num_stages, hop, ring, share, fill, busy)
        if found <= now or np.random.random() < math.exp((now - found) / temperature):
            order[:] = trial
            now = found
            if now < least:
                least = now
                best[:] = order
        temperature *= rate
    return best


@njit(cache=True)
def descend(
    start: Ints,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> Ints:
    """Until no swap, insertion or reversal is better."""
    order, trial = start.copy(), start.copy()
    now = guided(order, num_replicas, num_stages, hop, ring, share, fill, busy)
    size = len(order)
    improved = True
    while improved:
        improved = False
        for a in range(size):
            for b in range(size):
                for kind in range(3):
                    if a == b or (kind != 1 and b < a):
                        continue
                    move(order, kind, a, b, b, trial)
                    found = guided(trial, num_replicas, num_stages, hop, ring, share, fill, busy)
                    if found < now - 1e-15:
                        order[:] = trial
                        now = found
                        improved = True
    return order


@njit(cache=True)
def next_permutation(values: Ints) -> bool:
    """The next in lexicographic order, in place; False after the last."""
    i = len(values) - 2
    while i >= 0 and values[i] >= values[i + 1]:
        i -= 1
    if i < 0:
        return False
    j = len(values) - 1
    while values[j] <= values[i]:
        j -= 1
    values[i], values[j] = values[j], values[i]
    low, high = i + 1, len(values) - 1
    while low < high:
        values[low], values[high] = values[high], values[low]
        low += 1
        high -= 1
    return True


@njit(cache=True)
def best_permutation(
    order: Ints,
    places: Ints,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> Ints:
    """The best of all ways to exchange the units at `places`; the others stay."""
    values = np.sort(order[places])
    trial, best = order.copy(), order.copy()
    least = guided(order, num_replicas, num_stages, hop, ring, share, fill, busy)
    more = True
    while more:
        for i in range(len(places)):
            trial[places[i]] = values[i]
        found = guided(trial, num_replicas, num_stages, hop, ring, share, fill, busy)
        if found < least:
            least = found
            best[:] = trial
        more = next_permutation(values)
    return best


@njit(cache=True)
def exhaust(
    order: Ints,
    num_replicas: int,
    num_stages: int,
    hop: Floats,
    ring: Floats,
    share: Floats,
    fill: Floats,
    busy: Floats,
) -> Ints:
    """The cheapest of all orders from `order`, which is sorted, on; the first of equal ones."""
    best = order.copy()
    least = cost(order, num_replicas, num_stages, hop, ring, share, fill, busy)
    while next_permutation(order):
        found = cost(order, num_replicas, num_stages, hop, ring, share, fill, busy)
        if found < least:
            least = found
            best[:] = order
    return best
