"""Whole layers packed into ranks: a lower bound, and how many layers of each kind every rank should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled
from stagewright.planning.joint.problem import Problem

_PRECISION = 1e-6
_MOST_STATES = 200_000
_MOST_STEPS = 300_000_000


@dataclass(frozen=True, eq=False)
class Packing:
    """No schedule is shorter than `seconds`. `number[k, r]` layers of kind `k` on rank `r` come within a
    millionth of it; `kind_of_layer` numbers layers of equal cost. None where no packing was looked for."""

    seconds: float
    kind_of_layer: Ints
    number: Ints | None


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Layers of equal cost: seconds of all microbatches for forward and input gradient, and for weight
    gradient, and how many layers there are. Per rank, in the order of first layers: when it may start, and
    what follows its last input gradient."""

    passes_s: Floats
    weight_grad_s: Floats
    count: Ints
    starts: Floats
    tails: Floats


def pack(problem: Problem) -> Packing:
    """The least time in which whole layers can be packed into ranks, each with its fill and drain.

    Sort the ranks by their first layer: the first layer of the j-th is layer j or a later one. So it starts no
    earlier than after the forwards of the first j layers, does all work of its own, and its last input
    gradient is followed by those of the first j layers (beside which weight gradients may run):
    ``T >= sum_{k<j} f_k + M sum_l (f_l + i_l) + max(M sum_l w_l, sum_{k<j} i_k)`` over v, with l over the
    layers of the rank. The bound is the largest T, to within a millionth, for which no numbers of layers per
    rank keep to this: a dynamic program over the numbers of layers of each kind that the first j ranks can
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
        found = _packed_within(kinds, trial)
        if found is None:
            low = trial
            trial = min((low + high) / 2, 1.02 * low)
        else:
            number, high = found, trial
            trial = (low + high) / 2
    return Packing(low, kind_of_layer, number)


def pigeonhole(seconds: Sequence[float], num_ranks: int) -> float:
    """Of the ``k P + 1`` longest layers some rank has ``k + 1``, at least the shortest of them; for every k.

    >>> pigeonhole([3, 3, 2, 2, 1], 2)
    5
    """
    longest = sorted(seconds, reverse=True)
    best = 0.0
    for k in range((len(longest) - 1) // num_ranks + 1):
        top = longest[: k * num_ranks + 1]
        best = max(best, sum(top[-(k + 1) :]))
    return best


def _kinds(problem: Problem) -> tuple[_Kinds, Ints]:
    """The most numerous kind last."""
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
    """States times patterns times ranks."""
    most = np.minimum(kinds.count, limit // np.maximum(kinds.passes_s, 1e-30))
    return float(np.prod(kinds.count + 1.0) * np.prod(most[:-1] + 1.0) * len(kinds.starts))


def _packed_within(kinds: _Kinds, limit: float) -> Ints | None:
    """Numbers of layers, [kind, rank], with which every rank keeps to `limit`; None if there are none."""
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
    """The numbers of layers that one rank has time for, as many of the last kind as possible."""
    room = limit - start
    ranges = (
        range(int(min(count, max(0.0, room // max(seconds, 1e-30)))) + 1)
        for seconds, count in zip(kinds.passes_s[:-1], kinds.count[:-1], strict=True)
    )
    found = []
    for few in product(*ranges):
        passes = float(np.dot(few, kinds.passes_s[:-1]))
        weight_grads = float(np.dot(few, kinds.weight_grad_s[:-1]))
        by_tail = (room - tail - passes) / max(kinds.passes_s[-1], 1e-30)
        last = kinds.passes_s[-1] + kinds.weight_grad_s[-1]
        by_load = (room - passes - weight_grads) / max(last, 1e-30)
        most = np.floor(min(by_tail, by_load, float(kinds.count[-1])))
        if most >= 0:
            found.append((*few, int(most)))
    return np.array(found, np.int64).reshape(-1, len(kinds.count))


@compiled
def _extend(reached, patterns, count, strides):
    """The states that one more rank reaches, and where each came from; no kind beyond its count."""
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
