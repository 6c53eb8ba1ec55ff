import numpy as np
import pytest

from stagewright.errors import InputError, ScheduleError
from stagewright.schedule import Program, build, insert_communication
from stagewright.simulation import Contention, StageCosts, simulate


def program(*lines: str, microbatches: int, placement: str = "0 1") -> Program:
    ranks = "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))
    return Program.from_text(f"program test\nmicrobatches {microbatches}\nplacement {placement}\n{ranks}\n")


def times(timeline, rank):
    return {str(event.action): (event.start_s, event.end_s) for event in timeline.events(rank)}


def test_two_stages_by_hand():
    costs = StageCosts.of([1, 2], [3, 4], [5, 6])
    timeline = simulate(build("gpipe", 2, 2), costs, {(0, 1): 0.5})
    assert times(timeline, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (16, 24), "0B1": (26, 34)}
    assert times(timeline, 1) == {
        "1F0": (1.5, 3.5),
        "1F1": (3.5, 5.5),
        "1B0": (5.5, 15.5),
        "1B1": (15.5, 25.5),
    }
    assert timeline.makespan_s == 34
    assert timeline.busy_s.tolist() == [18, 24]
    assert timeline.idle_s.tolist() == [16, 10]
    assert timeline.bubble_fraction == pytest.approx(26 / 68)
    assert timeline.span_s.tolist() == [34, 24]


def test_transfers_of_one_link_follow_each_other():
    costs = StageCosts.of([1, 1], [1, 1], [0, 0])
    gpipe = build("gpipe", 2, 3)
    free = simulate(gpipe, costs, 5.0, contention=Contention.NONE)
    shared = simulate(gpipe, costs, 5.0)
    assert [times(free, 1)[f"1F{m}"][0] for m in range(3)] == [6, 7, 8]
    assert [times(shared, 1)[f"1F{m}"][0] for m in range(3)] == [6, 11, 16]


def test_senders_may_share_one_link_for_all_they_send():
    edges = [(0, 1), (1, 2), (0, 2)]
    costs = StageCosts.uniform(3)
    pair = simulate(build("gpipe", 3, 1), costs, 4.0, edges=edges)
    sender = simulate(build("gpipe", 3, 1), costs, 4.0, edges=edges, contention=Contention.SENDER)
    assert times(pair, 2)["2F0"][0] == 10
    assert times(sender, 2)["2F0"][0] == 10
    late = [(0, 1), (0, 2)]
    assert times(simulate(build("gpipe", 3, 1), costs, 4.0, edges=late), 2)["2F0"][0] == 5
    shared = simulate(build("gpipe", 3, 1), costs, 4.0, edges=late, contention=Contention.SENDER)
    assert times(shared, 2)["2F0"][0] == 9


def test_a_transfer_starts_when_both_sides_are_posted():
    late = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        microbatches=2,
    )
    costs = StageCosts.of([1, 4], [1, 1], [0, 0])
    timeline = simulate(late, costs, 3.0)
    assert times(timeline, 1)["1F0"] == (4, 8)
    assert times(timeline, 1)["1RECV_F1"] == (8, 8)
    assert times(timeline, 1)["1F1"] == (11, 15)


def test_overhead_counts_for_computations_only():
    lowered = insert_communication(build("1f1b", 2, 4))
    plain = simulate(lowered, StageCosts.uniform(2))
    slow = simulate(lowered, StageCosts.uniform(2), action_overhead_s=0.25)
    assert np.allclose(slow.busy_s - plain.busy_s, 8 * 0.25)


def test_memory_follows_the_actions():
    costs = StageCosts.of(
        [1], [1], [1], saved_bytes=10, held_bytes=4, base_bytes=100,
        forward_transient_bytes=7, input_grad_transient_bytes=50,
    )  # fmt: skip
    split = program("0F0 0F1 0I0 0I1 0W0 0W1", microbatches=2, placement="0")
    timeline = simulate(split, costs)
    curve = timeline.memory_curve(0)
    assert timeline.peak_bytes.tolist() == [170] == [curve.peak_bytes]
    changes = curve.num_bytes.tolist()
    assert changes == [100, 117, 110, 127, 120, 170, 114, 164, 108, 108, 104, 104, 100]


def test_a_deadlock_is_reported():
    stuck = program("0B0 0F0", "1F0 1B0", microbatches=1)
    with pytest.raises(ScheduleError, match=r"rank 0 is blocked at 0B0.*gradient of stage 1"):
        simulate(stuck, StageCosts.uniform(2))


def test_costs_must_fit_the_program():
    with pytest.raises(InputError, match="costs of 3 stages for a program of 2"):
        simulate(build("gpipe", 2, 2), StageCosts.uniform(3))
    with pytest.raises(InputError, match=r"did you mean 'saved_bytes'"):
        StageCosts.uniform(2, saved_byte=1)
    with pytest.raises(InputError, match="give one per stage"):
        StageCosts.of([1, 1], [1, 1], [1, 1, 1])
    with pytest.raises(InputError, match="no transfer time"):
        simulate(build("gpipe", 3, 2), StageCosts.uniform(3), {(0, 1): 1.0})
