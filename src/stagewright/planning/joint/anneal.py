"""Compiled annealing over layouts and rules: small moves, each judged by a list schedule.

A layout is the rank of every layer and where further stages start, so that one kind of move changes
partition, placement and the number of stages alike.
"""

from __future__ import annotations

import numba
import numpy as np

from stagewright.planning.joint.kernels import Floats, Rule, list_schedule
from stagewright.planning.joint.layout import build_stages

Tables = tuple[Floats, Floats, Floats, Floats, float]
"""Of a problem: sums per layer column, transfer seconds, speed and memory per rank, overhead."""

NUM_MOVES = 8
NO_BACKLOG = 1 << 40


@numba.njit(cache=True, nogil=True)
def window_of(stages, depth):
    """Most microbatches each stage may hold between forward and input gradient.

    A microbatch stays for the passes of all deeper stages, and a new one comes as often as the busiest rank
    allows, so full speed needs the quotient of the two; `depth` times that are admitted.
    """
    num_stages = len(stages.rank)
    if depth > 1e6:
        return np.full(num_stages, NO_BACKLOG)
    load = np.zeros(len(stages.limit))
    for stage in range(num_stages):
        load[stages.rank[stage]] += (
            stages.forward[stage] + stages.input_grad[stage] + stages.weight_grad[stage]
        )
    cycle = max(load.max(), 1e-30)
    window = np.empty(num_stages, np.int64)
    stay = 0.0
    for stage in range(num_stages - 1, -1, -1):
        stay += stages.forward[stage] + stages.input_grad[stage]
        if stage + 1 < num_stages:
            stay += 2.0 * stages.hop[stage + 1]
        window[stage] = max(1, int(np.ceil(depth * stay / cycle - 1e-9)))
    return window


@numba.njit(cache=True, nogil=True)
def makespan_of(rank_of_layer, is_cut, rule, tables, num_microbatches, give_up_s):
    """Of the list schedule of a layout; infinite where it is not shorter than `give_up_s`."""
    sums, transfer_s, speed, memory_bytes, overhead_s = tables
    stages = build_stages(rank_of_layer, is_cut, sums, transfer_s, speed, memory_bytes, overhead_s)
    for rank in range(len(speed)):
        needed = 0.0
        for n in range(stages.offsets[rank], stages.offsets[rank + 1]):
            needed += stages.saved[stages.members[n]]
        if stages.offsets[rank] == stages.offsets[rank + 1] or needed > stages.limit[rank] * (1 + 1e-9):
            return np.inf
    window = window_of(stages, rule.depth)
    return list_schedule(stages, num_microbatches, rule, window, give_up_s)[0]


@numba.njit(cache=True, nogil=True)
def anneal(rank_of_layer, is_cut, rule, tables, num_microbatches, num_steps, start_share, seed):
    """The best layout and rule found in `num_steps` moves, and its makespan.

    A move that makes the schedule longer is accepted with a probability that falls with the loss and with
    time; `start_share` is the loss, as a share of the makespan, accepted one time in e at the start.
    """
    np.random.seed(seed)
    num_ranks = len(tables[2])
    current = makespan_of(rank_of_layer, is_cut, rule, tables, num_microbatches, np.inf)
    best, best_ranks, best_cuts, best_rule = current, rank_of_layer.copy(), is_cut.copy(), rule
    ranks, cuts = rank_of_layer.copy(), is_cut.copy()
    for step in range(num_steps):
        share = start_share * (0.01 ** (step / num_steps))
        new_ranks, new_cuts, new_rule = ranks.copy(), cuts.copy(), rule
        if np.random.random() < 0.1:
            new_rule = _other_rule(rule)
        else:
            _move(new_ranks, new_cuts, num_ranks)
            if np.random.random() < 0.3:
                _move(new_ranks, new_cuts, num_ranks)
        limit = np.inf
        if current < np.inf:
            limit = current - share * best * np.log(1.0 - np.random.random())
        makespan = makespan_of(new_ranks, new_cuts, new_rule, tables, num_microbatches, limit)
        if makespan <= limit and makespan < np.inf:
            current, ranks, cuts, rule = makespan, new_ranks, new_cuts, new_rule
            if makespan < best:
                best, best_ranks, best_cuts, best_rule = makespan, ranks.copy(), cuts.copy(), rule
    return best, best_ranks, best_cuts, best_rule


@numba.njit(cache=True, nogil=True)
def _other_rule(rule):
    """The rule with one choice changed."""
    which = np.random.randint(6)
    forward_next, oldest, deep, depth, share, backlog = (
        rule.forward_next, rule.oldest, rule.deep_forwards, rule.depth, rule.share, rule.backlog,
    )  # fmt: skip
    if which == 0:
        forward_next = not forward_next
    elif which == 1:
        oldest = not oldest
    elif which == 2:
        deep = not deep
    elif which == 3:
        depth = np.inf if np.random.random() < 0.2 else 0.8 + 1.7 * np.random.random()
    elif which == 4:
        share = np.random.randint(5) / 4.0
    else:
        backlog = NO_BACKLOG if np.random.random() < 0.5 else np.random.randint(8)
    return Rule(forward_next, oldest, deep, depth, share, backlog, rule.holds_back)


@numba.njit(cache=True, nogil=True)
def _move(ranks, cuts, num_ranks):
    """Change the layout a little, in place."""
    num_layers = len(ranks)
    kind = np.random.randint(NUM_MOVES)
    layer, other = np.random.randint(num_layers), np.random.randint(num_layers)
    if kind <= 1:
        _shift_boundary(ranks, layer)
    elif kind == 2:
        ranks[layer] = np.random.randint(num_ranks)
    elif kind == 3:
        ranks[layer], ranks[other] = ranks[other], ranks[layer]
    elif kind == 4:
        _recolour(ranks, layer, np.random.randint(num_ranks))
    elif kind == 5:
        first, second = ranks[layer], ranks[other]
        _recolour(ranks, layer, second)
        if ranks[other] == second and layer != other:
            _recolour(ranks, other, first)
    elif kind == 6:
        cuts[layer] = not cuts[layer]
    else:
        first, second = ranks[layer], np.random.randint(num_ranks)
        for each in range(layer, num_layers):
            if ranks[each] == first:
                ranks[each] = second
            elif ranks[each] == second:
                ranks[each] = first


@numba.njit(cache=True, nogil=True)
def _shift_boundary(ranks, layer):
    """Give the layer at the first change of rank from `layer` on to the other side."""
    for each in range(layer, len(ranks)):
        if each > 0 and ranks[each] != ranks[each - 1]:
            if np.random.random() < 0.5:
                ranks[each] = ranks[each - 1]
            else:
                ranks[each - 1] = ranks[each]
            return


@numba.njit(cache=True, nogil=True)
def _recolour(ranks, layer, rank):
    """Move the run of layers around `layer` to `rank`."""
    own = ranks[layer]
    low = layer
    while low > 0 and ranks[low - 1] == own:
        low -= 1
    high = layer
    while high + 1 < len(ranks) and ranks[high + 1] == own:
        high += 1
    ranks[low : high + 1] = rank
