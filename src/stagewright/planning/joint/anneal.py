"""Compiled annealing over layouts and rules: small moves, each evaluated by a list schedule.

A layout is the rank of every layer and where further stages start, so that one kind of move changes
partition, placement and the number of stages alike.
"""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled
from stagewright.planning.joint.layout import build_stages
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of, window_of
from stagewright.schedule.list_scheduler.terms import Rule

NUM_MOVES = 11


@compiled
def makespan_of(rank_of_layer, is_cut, table_of_rank, rule, shifts, tables, batch, give_up_s):
    """Return the makespan of the list schedule of a layout; infinite where it is not shorter than `give_up_s`.

    `batch` is the number of microbatches scheduled and of those left out, each of which is taken to need the seconds of the
    busiest rank.
    """
    sums, moves, speed, memory_bytes, overhead_s = tables
    stages = build_stages(rank_of_layer, is_cut, table_of_rank, sums, moves, speed, memory_bytes, overhead_s)
    for rank in range(len(speed)):
        needed = 0.0
        for n in range(stages.offsets[rank], stages.offsets[rank + 1]):
            needed += stages.saved[stages.members[n]]
        if stages.offsets[rank] == stages.offsets[rank + 1] or needed > stages.limit[rank] * (1 + 1e-9):
            return np.inf
    window = window_of(stages, rule.depth)
    deadlines = deadlines_of(stages, rule, shifts)
    skipped_s = batch[1] * deadlines.cycle
    return skipped_s + list_schedule(stages, batch[0], rule, window, deadlines, give_up_s - skipped_s)[0]


@compiled
def anneal(rank_of_layer, is_cut, table_of_rank, rule, shifts, tables, batch, num_steps, start_share, seed):
    """Return the best layout and rule found in `num_steps` moves, and its makespan.

    A move that makes the schedule longer is accepted with a probability that falls with the loss and with
    time; `start_share` is the loss, as a share of the makespan, accepted one time in e at the start.
    """
    np.random.seed(seed)
    num_ranks, num_tables = len(tables[2]), len(tables[0])
    current = makespan_of(rank_of_layer, is_cut, table_of_rank, rule, shifts, tables, batch, np.inf)
    best, best_ranks, best_cuts, best_rule = current, rank_of_layer.copy(), is_cut.copy(), rule
    best_shifts, best_recompute = shifts.copy(), table_of_rank.copy()
    cycle = tables[0][0, :3, -1].sum() / num_ranks
    ranks, cuts, recompute = rank_of_layer.copy(), is_cut.copy(), table_of_rank.copy()
    for step in range(num_steps):
        share = start_share * (0.01 ** (step / num_steps))
        new_ranks, new_cuts, new_rule, new_shifts = ranks.copy(), cuts.copy(), rule, shifts.copy()
        new_recompute = recompute.copy()
        if num_tables > 1 and np.random.random() < 0.3:
            _change_recompute(new_recompute, num_tables)
        choice = np.random.random()
        if choice < 0.1:
            new_rule = _other_rule(rule)
        elif choice < 0.4 and rule.deadline_scale > 0.0:
            _shift(new_shifts, ranks, cycle)
        else:
            move_layers(new_ranks, new_cuts, num_ranks, tables[0][0])
            if np.random.random() < 0.3:
                move_layers(new_ranks, new_cuts, num_ranks, tables[0][0])
        limit = np.inf
        if current < np.inf:
            limit = current - share * best * np.log(1.0 - np.random.random())
        makespan = makespan_of(new_ranks, new_cuts, new_recompute, new_rule, new_shifts, tables, batch, limit)
        if makespan <= limit and makespan < np.inf:
            current, ranks, cuts, rule, shifts = makespan, new_ranks, new_cuts, new_rule, new_shifts
            recompute = new_recompute
            if makespan < best:
                best, best_ranks, best_cuts, best_rule = makespan, ranks.copy(), cuts.copy(), rule
                best_shifts, best_recompute = shifts.copy(), recompute.copy()
    return best, best_ranks, best_cuts, best_recompute, best_rule, best_shifts


@compiled
def _change_recompute(recompute, num_tables):
    """Let a rank recompute a little more or less, or as much as another."""
    rank = np.random.randint(len(recompute))
    if np.random.random() < 0.2:
        recompute[rank] = recompute[np.random.randint(len(recompute))]
    else:
        recompute[rank] = min(max(recompute[rank] + np.random.randint(5) - 2, 0), num_tables - 1)


@compiled
def _shift(shifts, ranks, cycle):
    """Change deadlines of forwards or input gradients: of a few neighbouring layers, of all layers from one on, or of a
    rank's layers (all alike, or earlier at one end and later at the other). Either those of microbatch 0 and with it all
    others, or the intervals between microbatches."""
    num_layers = shifts.shape[1]
    row, layer, kind = np.random.randint(2), np.random.randint(num_layers), np.random.randint(4)
    by = np.random.normal() * (2.0 if np.random.random() < 0.3 else 0.3)
    if np.random.random() < 0.3:
        row, by = row + 2, 0.1 * by
    else:
        by *= cycle
    if kind == 0:
        shifts[row, layer : min(num_layers, layer + 1 + int(4 * np.random.random() ** 2))] += by
    elif kind == 1:
        shifts[row, layer:] += by
    else:
        rank = ranks[layer]
        for index in range(num_layers):
            if ranks[index] == rank:
                shifts[row, index] += by if kind == 2 else by * (2.0 * index / num_layers - 1.0)


@compiled
def _other_rule(rule):
    """Return the rule with one choice changed."""
    which = np.random.randint(8)
    forward_next, oldest, deep, depth, share, max_deferred, deadline_scale = (
        rule.forward_next, rule.oldest, rule.deep_forwards, rule.depth, rule.share, rule.max_deferred, rule.deadline_scale,
    )  # fmt: skip
    if which == 0:
        forward_next = 1 - forward_next
    elif which == 1:
        oldest = not oldest
    elif which == 2:
        deep = not deep
    elif which == 3:
        depth = np.inf if np.random.random() < 0.2 else 0.8 + 1.7 * np.random.random()
    elif which == 4:
        share = np.random.randint(5) / 4.0
    elif which == 5:
        max_deferred = UNLIMITED if np.random.random() < 0.5 else np.random.randint(8)
    elif np.random.random() < 0.1:
        deadline_scale = 0.0 if deadline_scale > 0.0 else 1.5
    else:
        deadline_scale *= 0.7 + 0.6 * np.random.random()
    return Rule(forward_next, oldest, deep, depth, share, max_deferred, rule.holds_back, deadline_scale)


@compiled
def move_layers(ranks, cuts, num_ranks, sums):
    """Make a small change to the layout, in place."""
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
    elif kind >= 8:
        other = _alike(layer, sums)
        ranks[layer], ranks[other] = ranks[other], ranks[layer]
    else:
        first, second = ranks[layer], np.random.randint(num_ranks)
        for index in range(layer, num_layers):
            if ranks[index] == first:
                ranks[index] = second
            elif ranks[index] == second:
                ranks[index] = first


@compiled
def _alike(layer, sums):
    """Return another layer of the same cost, usually nearby: exchanging the two changes no rank's work."""
    num_layers = sums.shape[1] - 1
    reach = 4 if np.random.random() < 0.5 else num_layers
    for _ in range(10):
        other = layer + np.random.randint(2 * reach + 1) - reach
        if 0 <= other < num_layers and other != layer:
            same = True
            for row in range(3):
                mine = sums[row, layer + 1] - sums[row, layer]
                same &= abs(mine - (sums[row, other + 1] - sums[row, other])) <= 1e-9 * mine
            if same:
                return other
    return layer


@compiled
def _shift_boundary(ranks, layer):
    """Move the layer at the first change of rank from `layer` on to the other side."""
    for index in range(layer, len(ranks)):
        if index > 0 and ranks[index] != ranks[index - 1]:
            if np.random.random() < 0.5:
                ranks[index] = ranks[index - 1]
            else:
                ranks[index - 1] = ranks[index]
            return


@compiled
def _recolour(ranks, layer, rank):
    """Move the run of layers around `layer` to `rank`."""
    old_rank = ranks[layer]
    low = layer
    while low > 0 and ranks[low - 1] == old_rank:
        low -= 1
    high = layer
    while high + 1 < len(ranks) and ranks[high + 1] == old_rank:
        high += 1
    ranks[low : high + 1] = rank
