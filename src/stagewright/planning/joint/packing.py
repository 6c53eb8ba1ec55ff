"""A packing of whole layers into ranks: a lower bound, and numbers of layers of each kind per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled
from stagewright.planning.joint.problem import JointProblem

_PRECISION = 1e-6
_MOST_STATES = 200_000
_MOST_STEPS = 300_000_000


@dataclass(frozen=True, eq=False)
class Packing:
    """A packing of layers into ranks; no schedule is shorter than `seconds`.

    `number[k, r]` layers of kind `k` on rank `r` come within a millionth of that; None where no packing was searched.
    `kind_of_layer` has equal numbers for layers of equal cost.
    """

    seconds: float
    kind_of_layer: Ints
    number: Ints | None


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Kinds of layers of equal cost: seconds of all microbatches for forward and input gradient, and for weight gradient,
    and the number of layers. Per rank, in the order of first layers: its earliest start, and the seconds after its last
    input gradient."""

    chain_s: Floats
    weight_grad_s: Floats
    count: Ints
    starts: Floats
    tails: Floats


def pack(problem: JointProblem) -> Packing:
    """Return the packing of whole layers into ranks with the least time, including each rank's fill and drain.

    Sort the ranks by their first layer: the first layer of the j-th is layer j or a later one. So it starts no
    earlier than after the forwards of the first j layers, does all its own work, and its last input
    gradient is followed by those of the first j layers (during which weight gradients may run):
    ``T >= sum_{k<j} f_k + M sum_l (f_l + i_l) + max(M sum_l w_l, sum_{k<j} i_k)`` over v, with l over the
    layers of the rank. The bound is the largest T, to within a millionth, for which no numbers of layers per
    rank satisfy this: a dynamic program over the numbers of layers of each kind that the first j ranks can
    take. With too many kinds of layers for it, the bound is that of `pigeonhole`.
    """
    kinds, kind_of_layer = _kinds(problem)
    all_s = problem.num_microbatches * problem.layers.seconds / problem.speed.max()
    simple = max(pigeonhole(all_s.tolist(), problem.num_ranks), all_s.sum() / problem.num_ranks)
    low, high = simple, 2.0 * float(all_s.sum()) + float((kinds.starts + kinds.tails).max())
    number = None
    if np.prod(kinds.count + 1.0) > _MOST_STATES or _num_steps(kinds, 1.5 * simple) > _MOST_STEPS:
        return Packing(simple, kind_of_layer, None)
    trial = low
    while high - low > _PRECISION * low:
        packed = _packed_within(kinds, trial)
        if packed is None:
            low = trial
            trial = min((low + high) / 2, 1.02 * low)
        else:
            number, high = packed, trial
            trial = (low + high) / 2
    return Packing(low, kind_of_layer, number)


def pigeonhole(seconds: Sequence[float], num_ranks: int) -> float:
    """Return a lower bound: of the ``k P + 1`` longest layers some rank has ``k + 1``, at least the shortest, for every k.

    >>> pigeonhole([3, 3, 2, 2, 1], 2)
    5
    """
    longest = sorted(seconds, reverse=True)
    best = 0.0
    for k in range((len(longest) - 1) // num_ranks + 1):
        top = longest[: k * num_ranks + 1]
        best = max(best, sum(top[-(k + 1) :]))
    return best


def _kinds(problem: JointProblem) -> tuple[_Kinds, Ints]:
    """Return the kinds of layers, the most numerous last, and the kind of every layer."""
    layers, fastest = problem.layers, problem.speed.max()
    costs = np.array([layers.forward_s + layers.input_grad_s, layers.weight_grad_s])
    unique, kind_of_layer, count = np.unique(costs, axis=1, return_inverse=True, return_counts=True)
    order = np.argsort(count, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    scale = problem.num_microbatches / fastest
    before = (
        (np.cumsum(column) - column)[: problem.num_ranks] / fastest
        for column in (layers.forward_s, layers.input_grad_s)
    )
    kinds = _Kinds(unique[0, order] * scale, unique[1, order] * scale, count[order], *before)
    return kinds, place[kind_of_layer.reshape(-1)]


def _num_steps(kinds: _Kinds, limit: float) -> float:
    """Return the number of steps: states times patterns times ranks."""
    most = np.minimum(kinds.count, limit // np.maximum(kinds.chain_s, 1e-30))
    return float(np.prod(kinds.count + 1.0) * np.prod(most[:-1] + 1.0) * len(kinds.starts))


def _packed_within(kinds: _Kinds, limit: float) -> Ints | None:
    """Return numbers of layers, [kind, rank], with which every rank stays within `limit`, or None if there are none."""
    strides = np.concatenate([[1], np.cumprod(kinds.count + 1)[:-1]])
    reached = np.zeros(int(np.prod(kinds.count + 1)), np.bool_)
    reached[0] = True
    patterns, origins = [], []
    for start, tail in zip(kinds.starts, kinds.tails, strict=True):
        patterns.append(_patterns(kinds, start, tail, limit * (1 + 1e-12)))
        reached, origin = _extend(reached, patterns[-1], kinds.count, strides)
        origins.append(origin)
    at = int((kinds.count * strides).sum())
    if not reached[at]:
        return None
    number = np.zeros((len(kinds.count), len(kinds.starts)), np.int64)
    for rank in range(len(kinds.starts) - 1, -1, -1):
        here = at // strides % (kinds.count + 1)
        at = int(origins[rank][at])
        number[:, rank] = here - at // strides % (kinds.count + 1)
    return number


def _patterns(kinds: _Kinds, start: float, tail: float, limit: float) -> Ints:
    """Return the numbers of layers that one rank has time for, with as many of the last kind as possible."""
    available_s = limit - start
    ranges = (
        range(int(min(count, max(0.0, available_s // max(seconds, 1e-30)))) + 1)
        for seconds, count in zip(kinds.chain_s[:-1], kinds.count[:-1], strict=True)
    )
    patterns = []
    for few in product(*ranges):
        chained = float(np.dot(few, kinds.chain_s[:-1]))
        weight_grads = float(np.dot(few, kinds.weight_grad_s[:-1]))
        by_tail = (available_s - tail - chained) / max(kinds.chain_s[-1], 1e-30)
        last = kinds.chain_s[-1] + kinds.weight_grad_s[-1]
        by_load = (available_s - chained - weight_grads) / max(last, 1e-30)
        most = np.floor(min(by_tail, by_load, float(kinds.count[-1])))
        if most >= 0:
            patterns.append((*few, int(most)))
    return np.array(patterns, np.int64).reshape(-1, len(kinds.count))


@compiled
def _extend(reached, patterns, count, strides):
    """Return the states that one more rank reaches and the origin of each; no kind exceeds its count."""
    after = np.zeros_like(reached)
    origin = np.full(len(reached), -1)
    for state in range(len(reached)):
        if not reached[state]:
            continue
        for n in range(len(patterns)):
            target = 0
            for kind in range(len(count)):
                have = state // strides[kind] % (count[kind] + 1)
                target += min(have + patterns[n, kind], count[kind]) * strides[kind]
            if not after[target]:
                after[target] = True
                origin[target] = state
    return after, origin
