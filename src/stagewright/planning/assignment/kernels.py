"""Compiled kernels of rank assignment: the cost of an order, five moves, annealing, descent and exhaustive search."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled

Words = NDArray[np.uint64]

NUM_MOVES = 5
_WHOLE = 2**31
"""Size of the range from which probabilities are drawn."""
_SPREAD = 11400714819323198485
"""Multiplier that moves neighbouring seeds far apart."""
_TIE = 1e-3
"""Weight of means relative to maxima, so that a search sees progress while the slowest stays the same."""


class AssignmentArrays(NamedTuple):
    """The arrays of an `assignment.problem.AssignmentProblem`."""

    num_replicas: int
    num_stages: int
    transfer: Floats
    ring: Floats
    share: Floats
    tie: Floats
    tied_first: int
    tied_last: int
    node: Ints
    shares_nodes: bool


@compiled
def _through_nodes(order: Ints, terms: AssignmentArrays) -> tuple[float, float]:
    """Return the slowest edge of all rings, and the sum of edges, where a node holds several units.

    Each unit of a node in a ring has its own edge to the next node, so these edges are faster by that factor.
    """
    num_replicas, num_stages = terms.num_replicas, terms.num_stages
    firsts, lasts, counts = np.empty((3, num_replicas), np.int64)
    places, met_in = np.zeros(
        (2, len(order)), np.int64
    )  # of a node: its place in the ring of a stage, and the last such stage
    slowest = total = 0.0
    for stage in range(num_stages):
        share, num_nodes = terms.share[stage], 0
        for replica in range(num_replicas):
            unit = order[replica * num_stages + stage]
            node = terms.node[unit]
            if met_in[node] == stage + 1:
                at = places[node]
                edge = share * terms.ring[lasts[at], unit]
                slowest, total = max(slowest, edge), total + edge
                counts[at] += 1
            else:
                at = places[node] = num_nodes
                met_in[node] = stage + 1
                firsts[at], counts[at] = unit, 1
                num_nodes += 1
            lasts[at] = unit
        for at in range(num_nodes):
            following = (at + 1) % num_nodes
            edge = 0.0
            if counts[at] > 1:
                edge = share * terms.ring[lasts[at], firsts[at]]
            if num_nodes > 1:
                crossing = share * terms.ring[firsts[at], firsts[following]]
                edge = max(edge, crossing / min(counts[at], counts[following]))
            slowest, total = max(slowest, edge), total + edge
    return slowest, total


@compiled
def _weighed(order: Ints, terms: AssignmentArrays) -> tuple[float, float]:
    """Return seconds (the slowest pipeline, ring and tied pair), and the means of pipelines, pairs and rings."""
    num_replicas, num_stages = terms.num_replicas, terms.num_stages
    through = slowest = tying = 0.0
    sum_through = sum_ring = sum_tying = 0.0
    for replica in range(num_replicas):
        total = 0.0
        first = replica * num_stages
        for stage in range(num_stages):
            unit = order[first + stage]
            if stage + 1 < num_stages:
                total += float(terms.transfer[unit, order[first + stage + 1]])
            if num_replicas > 1 and not terms.shares_nodes:
                follower = order[((replica + 1) % num_replicas) * num_stages + stage]
                edge = terms.share[stage] * terms.ring[unit, follower]
                slowest = max(slowest, edge)
                sum_ring += edge
        sum_through += total
        through = max(through, total)
        pair = float(terms.tie[order[first + terms.tied_first], order[first + terms.tied_last]])
        sum_tying += pair
        tying = max(tying, pair)
    if num_replicas > 1 and terms.shares_nodes:
        slowest, sum_ring = _through_nodes(order, terms)
    mean = (sum_through + sum_tying) / num_replicas + sum_ring / (num_replicas * num_stages)
    return through + slowest + tying, mean


@compiled
def cost(order: Ints, terms: AssignmentArrays) -> float:
    """Return seconds: the slowest pipeline, the slowest ring and the slowest tied pair."""
    return _weighed(order, terms)[0]


@compiled
def guided(order: Ints, terms: AssignmentArrays) -> float:
    """Return `cost` plus a small fraction of the means of the same terms."""
    seconds, mean = _weighed(order, terms)
    return seconds + _TIE * mean


@compiled
def _drawn(state: Words, below: int) -> int:
    """Return a random number from 0 to `below` - 1, and advance `state`.

    Source: Vigna 2016, "An experimental exploration of Marsaglia's xorshift generators, scrambled" (xorshift64*). It
    compiles in half of the time that NumPy's generator takes.
    """
    word = state[0]
    word ^= word >> np.uint64(12)
    word ^= word << np.uint64(25)
    word ^= word >> np.uint64(27)
    state[0] = word
    return int((word * np.uint64(2685821657736338717) >> np.uint64(33)) % np.uint64(below))


@compiled
def _copy(source: Ints, out: Ints) -> None:
    for i in range(len(source)):
        out[i] = source[i]


@compiled
def move(order: Ints, kind: int, a: int, b: int, to: int, out: Ints) -> None:
    """Write `order` after one of five moves into `out`: reverse a..b, insert, swap, move a..b, move a..b reversed."""
    size = len(order)
    if kind == 2:
        _copy(order, out)
        out[a], out[b] = order[b], order[a]
        return
    low, high = min(a, b), max(a, b)
    if kind == 0:
        _copy(order, out)
        for i in range(high - low + 1):
            out[low + i] = order[high - i]
        return
    if kind == 1:
        low, high = a, a
    length = high - low + 1
    num_others = size - length
    place = to % (num_others + 1)
    index = 0
    for i in range(num_others + 1):
        if i == place:
            for j in range(length):
                out[index] = order[high - j] if kind == 4 else order[low + j]
                index += 1
        if i < num_others:
            out[index] = order[i] if i < low else order[i + length]
            index += 1


@compiled
def anneal(start: Ints, num_steps: int, hot: float, cold: float, seed: int, terms: AssignmentArrays) -> Ints:
    """Return the best order seen in `num_steps` moves while the temperature falls from `hot` to `cold` seconds."""
    state = np.zeros(1, np.uint64)
    state[0] = np.uint64(seed + 1) * np.uint64(_SPREAD)
    order, trial = start.copy(), start.copy()
    now = guided(order, terms)
    best, least = order.copy(), now
    size = len(order)
    rate = (cold / hot) ** (1.0 / num_steps)
    temperature = hot
    for _ in range(num_steps):
        a, b = _drawn(state, size), _drawn(state, size)
        move(order, _drawn(state, NUM_MOVES), a, b, _drawn(state, size), trial)
        trial_cost = guided(trial, terms)
        if trial_cost <= now or _drawn(state, _WHOLE) < _WHOLE * math.exp((now - trial_cost) / temperature):
            _copy(trial, order)
            now = trial_cost
            if now < least:
                least = now
                _copy(order, best)
        temperature *= rate
    return best


@compiled
def descend(start: Ints, terms: AssignmentArrays) -> Ints:
    """Return the order after improvements until no swap, insertion or reversal is better."""
    order, trial = start.copy(), start.copy()
    now = guided(order, terms)
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
                    trial_cost = guided(trial, terms)
                    if trial_cost < now - 1e-15:
                        _copy(trial, order)
                        now = trial_cost
                        improved = True
    return order


@compiled
def next_permutation(values: Ints) -> bool:
    """Change `values` to the next permutation in lexicographic order; return False after the last."""
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


@compiled
def best_permutation(order: Ints, places: Ints, values: Ints, terms: AssignmentArrays) -> Ints:
    """Return the best order with the units `values`, sorted, permuted over `places`; the others stay."""
    trial, best = order.copy(), order.copy()
    least = guided(order, terms)
    more = True
    while more:
        for i in range(len(places)):
            trial[places[i]] = values[i]
        trial_cost = guided(trial, terms)
        if trial_cost < least:
            least = trial_cost
            _copy(trial, best)
        more = next_permutation(values)
    return best


@compiled
def exhaust(order: Ints, terms: AssignmentArrays) -> Ints:
    """Return the cheapest of all orders from the sorted `order` on; the first of equal ones."""
    best = order.copy()
    least = cost(order, terms)
    while next_permutation(order):
        trial_cost = cost(order, terms)
        if trial_cost < least:
            least = trial_cost
            _copy(order, best)
    return best
