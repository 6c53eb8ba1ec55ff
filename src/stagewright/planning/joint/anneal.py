"""Compiled annealing over layouts and rules: small moves, each evaluated by a list schedule; and reduction of transfers to
as few as a makespan allows, since hidden transfers still use links.

A layout is the rank of every layer and where further stages start, so that one kind of move changes
partition, placement and the number of stages alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Bools, Floats, Ints
from stagewright.compiled import compiled
from stagewright.planning.joint.layout import build_stages
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of, window_of
from stagewright.schedule.list_scheduler.terms import Rule

NUM_MOVES = 11

MARGIN = 1e-9
"""Relative difference by which equal makespans may differ, as floating-point sums depend on their order."""

_MOVES_PER_STEP = 20
"""Moves per list schedule: most moves add transfers, which is found out in a fraction of the time of a schedule."""


class JointState(NamedTuple):
    """A layout and the policy of its list schedule; see `Layout` and `DeadlinePolicy`."""

    rank_of_layer: Ints
    is_cut: Bools
    table_of_rank: Ints
    rule: Rule
    shifts: Floats


@compiled
def makespan_of(state, costs, batch, give_up_s):
    """Return the makespan of the list schedule of a layout; infinite where it is not shorter than `give_up_s`.

    `batch` is the number of microbatches scheduled and of those left out, each of which is taken to need the seconds of the
    busiest rank.
    """
    rule = state.rule
    stages = build_stages(state.rank_of_layer, state.is_cut, state.table_of_rank, costs)
    for rank in range(len(costs.speed)):
        needed = 0.0
        for n in range(stages.offsets[rank], stages.offsets[rank + 1]):
            needed += stages.saved[stages.members[n]]
        if stages.offsets[rank] == stages.offsets[rank + 1] or needed > stages.limit[rank] * (1 + 1e-9):
            return np.inf
    window = window_of(stages, rule.depth)
    deadlines = deadlines_of(stages, rule, state.shifts)
    skipped_s = batch[1] * deadlines.cycle
    return skipped_s + list_schedule(stages, batch[0], rule, window, deadlines, give_up_s - skipped_s)[0]


@compiled
def anneal(state, costs, batch, num_steps, start_share, seed):
    """Return the least makespan found in `num_steps` moves, and its state.

    A move that makes the schedule longer is accepted with a probability that falls with the loss and with
    time; `start_share` is the loss, as a share of the makespan, accepted one time in e at the start.
    """
    np.random.seed(seed)
    num_ranks, num_tables = len(costs.speed), len(costs.sums)
    current = makespan_of(state, costs, batch, np.inf)
    best, best_state = current, _copied(state)
    cycle = costs.sums[0, :3, -1].sum() / num_ranks
    for step in range(num_steps):
        share = start_share * (0.01 ** (step / num_steps))
        ranks, cuts, recompute, rule, shifts = _copied(state)
        if num_tables > 1 and np.random.random() < 0.3:
            _change_recompute(recompute, num_tables)
        choice = np.random.random()
        if choice < 0.1:
            rule = _other_rule(rule)
        elif choice < 0.4 and rule.deadline_scale > 0.0:
            _shift(shifts, ranks, cycle)
        else:
            move_layers(ranks, cuts, num_ranks, costs.sums[0])
            if np.random.random() < 0.3:
                move_layers(ranks, cuts, num_ranks, costs.sums[0])
        changed = JointState(ranks, cuts, recompute, rule, shifts)
        limit = np.inf
        if current < np.inf:
            limit = current - share * best * np.log(1.0 - np.random.random())
        makespan = makespan_of(changed, costs, batch, limit)
        if makespan <= limit and makespan < np.inf:
            current, state = makespan, changed
            if makespan < best:
                best, best_state = makespan, changed
    return best, best_state


@compiled
def _copied(state):
    """Return the state with arrays of its own."""
    return JointState(
        state.rank_of_layer.copy(), state.is_cut.copy(), state.table_of_rank.copy(), state.rule, state.shifts.copy()
    )  # fmt: skip


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


@compiled
def gather(state, costs, batch, limit_s, num_steps, seed):
    """Return makespan, ranks and cuts with the fewest transfers found in `num_steps` list schedules.

    Of equals those with the fewest stages are taken; the makespan is at most `limit_s`.

    Moves are those of `anneal`. One that adds transfers costs no schedule, one that does not change their number is
    accepted.
    """
    np.random.seed(seed)
    ranks, cuts = state.rank_of_layer.copy(), state.is_cut.copy()
    num_ranks = len(costs.speed)
    makespan = makespan_of(state, costs, batch, np.inf)
    transfers, stages = count(ranks, cuts)
    best = makespan, ranks, cuts, transfers, stages
    for _ in range(_MOVES_PER_STEP * num_steps):
        if num_steps == 0:
            break
        new_ranks, new_cuts = ranks.copy(), cuts.copy()
        move_layers(new_ranks, new_cuts, num_ranks, costs.sums[0])
        if np.random.random() < 0.3:
            move_layers(new_ranks, new_cuts, num_ranks, costs.sums[0])
        new_transfers, new_stages = count(new_ranks, new_cuts)
        if new_transfers > transfers or (new_transfers == transfers and new_stages > stages):
            continue
        if (new_ranks == ranks).all() and (new_cuts == cuts).all():
            continue
        num_steps -= 1
        changed = JointState(new_ranks, new_cuts, state.table_of_rank, state.rule, state.shifts)
        new_makespan = makespan_of(changed, costs, batch, limit_s)
        if new_makespan > limit_s:
            continue
        makespan, ranks, cuts = new_makespan, new_ranks, new_cuts
        transfers, stages = new_transfers, new_stages
        if transfers < best[3] or (transfers == best[3] and stages < best[4]):
            best = makespan, ranks.copy(), cuts.copy(), transfers, stages
    return best[0], best[1], best[2]


@compiled
def count(ranks, cuts):
    """Return the number of transfers of a microbatch between ranks, and the number of stages."""
    transfers, stages = 0, 1
    for layer in range(1, len(ranks)):
        if ranks[layer] != ranks[layer - 1]:
            transfers += 1
            stages += 1
        elif cuts[layer]:
            stages += 1
    return transfers, stages
