"""Compiled reduction of transfers to as few as a makespan allows, since hidden transfers still use links."""

from __future__ import annotations

import numpy as np

from stagewright.compiled import compiled
from stagewright.planning.joint.anneal import makespan_of, move_layers

MARGIN = 1e-9
"""Relative difference by which equal makespans may differ, as floating-point sums depend on their order."""

_MOVES_PER_STEP = 20
"""Moves per list schedule: most moves add transfers, which is found out in a fraction of the time of a schedule."""


@compiled
def gather(rank_of_layer, is_cut, table_of_rank, rule, shifts, tables, batch, limit_s, num_steps, seed):
    """Return makespan, ranks and cuts with the fewest transfers found in `num_steps` list schedules.

    Of equals those with the fewest stages are taken; the makespan is at most `limit_s`.

    Moves are those of `anneal.anneal`. One that adds transfers costs no schedule, one that does not change their number is
    accepted.
    """
    np.random.seed(seed)
    ranks, cuts = rank_of_layer.copy(), is_cut.copy()
    num_ranks = len(tables[2])
    makespan = makespan_of(ranks, cuts, table_of_rank, rule, shifts, tables, batch, np.inf)
    transfers, stages = count(ranks, cuts)
    best = makespan, ranks, cuts, transfers, stages
    for _ in range(_MOVES_PER_STEP * num_steps):
        if num_steps == 0:
            break
        new_ranks, new_cuts = ranks.copy(), cuts.copy()
        move_layers(new_ranks, new_cuts, num_ranks, tables[0][0])
        if np.random.random() < 0.3:
            move_layers(new_ranks, new_cuts, num_ranks, tables[0][0])
        new_transfers, new_stages = count(new_ranks, new_cuts)
        if new_transfers > transfers or (new_transfers == transfers and new_stages > stages):
            continue
        if (new_ranks == ranks).all() and (new_cuts == cuts).all():
            continue
        num_steps -= 1
        new_makespan = makespan_of(new_ranks, new_cuts, table_of_rank, rule, shifts, tables, batch, limit_s)
        if new_makespan > limit_s:
            continue
        makespan, ranks, cuts, transfers, stages = (
            new_makespan,
            new_ranks,
            new_cuts,
            new_transfers,
            new_stages,
        )
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
