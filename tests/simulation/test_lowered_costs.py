"""What recomputation and sharding cost and save."""

from stagewright.schedule import (
    build,
    insert_gathers,
    insert_recomputation,
    insert_reductions,
)
from stagewright.simulation import StageCosts, simulate


def test_recomputation_trades_time_for_memory():
    costs = StageCosts.uniform(4, saved_bytes=10, checkpoint_bytes=1)
    plain = simulate(build("1f1b", 4, 8), costs)
    saving = simulate(insert_recomputation(build("1f1b", 4, 8), range(4)), costs)
    # on the way in and out of the pipeline a rank recomputes while it waits for the gradient
    assert saving.makespan_s == 8 * 4 + 3 * 3
    assert plain.peak_bytes.tolist() == [40, 30, 20, 10]
    # one microbatch is whole while its backward runs, the others are checkpoints
    assert saving.peak_bytes.tolist() == [13, 12, 11, 10]


def test_gathers_hide_behind_the_stage_before():
    program = insert_reductions(insert_gathers(build("breadth-first", 1, 4, 3)))
    hidden = simulate(program, StageCosts.uniform(3, gather_s=2.0, reduce_s=2.0, gathered_bytes=5))
    # exposed: the first gather and the last reduction
    assert hidden.makespan_s == 3 * 4 * 3 + 2 + 2
    assert hidden.peak_bytes.tolist() == [10]
    exposed = simulate(program, StageCosts.uniform(3, gather_s=6.0))
    assert exposed.makespan_s > 3 * 4 * 3 + 6
