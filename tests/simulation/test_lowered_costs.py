"""What recomputation and sharding cost and save."""

import numpy as np

from stagewright.schedule import (
    build,
    insert_gathers,
    insert_recomputation,
    insert_reductions,
)
from stagewright.simulation import StageCosts, difference, simulate, split_bubbles


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


def test_bubbles_add_up_to_the_idle_time():
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v"):
        program = build(name, 4, 9)
        rng = np.random.default_rng(1)
        costs = StageCosts.of(*rng.uniform(0.5, 2, (3, program.num_stages)))
        timeline = simulate(program, costs, 0.2)
        bubbles = split_bubbles(timeline)
        assert np.allclose(bubbles.warmup_s + bubbles.residual_s + bubbles.cooldown_s, timeline.idle_s)
        assert (np.stack([bubbles.warmup_s, bubbles.residual_s, bubbles.cooldown_s]) > -1e-9).all()
    gpipe = split_bubbles(simulate(build("gpipe", 3, 4), StageCosts.uniform(3)))
    assert gpipe.warmup_s.tolist() == [2, 2, 2]
    assert gpipe.cooldown_s.tolist() == [4, 4, 4]
    assert gpipe.residual_s.tolist() == [0, 0, 0]


def test_differences_name_what_moved():
    costs = StageCosts.uniform(2)
    plain = simulate(build("1f1b", 2, 3), costs)
    assert difference(plain, simulate(build("1f1b", 2, 3), costs)).moved == ()
    slower = simulate(build("1f1b", 2, 3), StageCosts.of([1, 2], [1, 1], [1, 1]))
    change = difference(plain, slower)
    assert change.makespan_s == slower.makespan_s - plain.makespan_s > 0
    assert str(change.first_moved.action) == "1F0" and change.first_moved.duration_s == 1
    split = difference(plain, simulate(build("1f1b", 2, 3, split_backward=True), costs))
    assert {str(action) for action in split.only_first} == {f"{s}B{m}" for s in range(2) for m in range(3)}
    assert len(split.only_second) == 12
