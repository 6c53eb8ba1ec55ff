"""Compiled load balancing: layers exchanged between ranks until the busiest has as little work as possible."""

from __future__ import annotations

import numpy as np

from stagewright.arrays import Ints
from stagewright.compiled import compiled
from stagewright.planning.joint.problem import JointProblem

_NUM_STEPS = 20_000


def load_balanced(problem: JointProblem, rank_of_layer: Ints, seed: int = 0) -> Ints:
    """Return the ranks of layers with a smaller maximum time over the ranks, changed in few places.

    The time of a rank is a lower bound on its end: see `bounds.layer_bound`, applied to all its layers.
    """
    layers = problem.layers
    before = np.array([np.cumsum(column) - column for column in (layers.forward_s, layers.input_grad_s)])
    return _balance(
        rank_of_layer.astype(np.int64),
        np.array([layers.forward_s, layers.input_grad_s, layers.weight_grad_s]),
        before,
        problem.speed,
        problem.num_microbatches,
        _NUM_STEPS,
        seed,
    )


@compiled
def _balance(rank_of_layer, seconds, before, speed, num_microbatches, num_steps, seed):
    np.random.seed(seed)
    num_layers, num_ranks = len(rank_of_layer), len(speed)
    ranks = rank_of_layer.copy()
    time = np.empty(num_ranks)
    for rank in range(num_ranks):
        time[rank] = _time(rank, ranks, seconds, before, speed, num_microbatches)
    for _ in range(num_steps):
        worst = np.argmax(time)
        layer = np.random.randint(num_layers)
        if ranks[layer] != worst:
            continue
        other = np.random.randint(num_layers)
        rank = ranks[other]
        if rank == worst:
            continue
        moves = np.random.random() < 0.3
        ranks[layer] = rank
        if not moves:
            ranks[other] = worst
        worst_time = _time(worst, ranks, seconds, before, speed, num_microbatches)
        rank_time = _time(rank, ranks, seconds, before, speed, num_microbatches)
        if max(worst_time, rank_time) < time[worst] * (1 - 1e-12):
            time[worst], time[rank] = worst_time, rank_time
        else:
            ranks[layer] = worst
            ranks[other] = rank
    return ranks


@compiled
def _time(rank, ranks, seconds, before, speed, num_microbatches):
    """Return a lower bound on the end of `rank` in seconds; infinite without a layer."""
    low = -1
    passes, weight_grads = 0.0, 0.0
    for layer in range(len(ranks)):
        if ranks[layer] == rank:
            if low < 0:
                low = layer
            passes += seconds[0, layer] + seconds[1, layer]
            weight_grads += seconds[2, layer]
    if low < 0:
        return np.inf
    tail = max(num_microbatches * weight_grads / speed[rank], before[1, low] / speed.max())
    return before[0, low] / speed.max() + num_microbatches * passes / speed[rank] + tail
