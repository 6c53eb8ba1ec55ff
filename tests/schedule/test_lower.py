import pytest

from random_programs import random_program
from stagewright.errors import ScheduleError
from stagewright.schedule import BUILDERS, Kind, build, insert_communication, verify
from stagewright.schedule.action import COMPUTE, RECEIVES, Action
from stagewright.simulation import StageCosts, simulate


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_any_valid_program_lowers_to_one_without_deadlock(seed, ahead):
    program, edges = random_program(seed)
    verify(program, edges)
    lowered = verify(insert_communication(program, edges, ahead=ahead), edges)
    assert lowered.compute_only() == program


def test_receives_are_posted_one_computation_ahead_and_not_all_in_front():
    lowered = insert_communication(build("1f1b", 4, 16))
    actions = lowered.actions(1)
    for index, action in enumerate(actions):
        if action.kind in RECEIVES:
            user = Action(Kind.F if action.kind is Kind.RECV_F else Kind.B, action.stage, action.microbatch)
            between = [a for a in actions[index : actions.index(user)] if a.kind in COMPUTE]
            assert len(between) <= 2


SIZES = {"interleaved-1f1b": 3, "breadth-first": 3, "hanayo": 4, "interleaved-zb": 2, "greedy": 2}


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"pipedream", "pipedream-2bw"}))
@pytest.mark.parametrize("transfer_s", [0.3, 1.0])
def test_receives_posted_a_few_computations_ahead_cost_no_time(name, transfer_s):
    options = {"num_moves": 20} if name in ("zb-auto", "v-half", "v-min") else {}
    program = build(name, 4, 12, SIZES.get(name), **options)
    costs = StageCosts.uniform(program.num_stages)
    unlimited = simulate(program, costs, transfer_s).makespan_s
    enough = 4 if name == "hanayo" else 2  # its stages change direction, so more lies between post and use
    for ahead, most in ((1, 1.05), (enough, 1 + 1e-12)):
        lowered = insert_communication(program, ahead=ahead)
        assert simulate(lowered, costs, transfer_s).makespan_s <= most * unlimited


def test_what_is_lowered_is_not_lowered_again():
    with pytest.raises(ScheduleError, match="already has sends"):
        insert_communication(insert_communication(build("gpipe", 2, 2)))


def test_a_single_rank_needs_no_transfers():
    assert not insert_communication(build("1f1b", 1, 3)).is_lowered
