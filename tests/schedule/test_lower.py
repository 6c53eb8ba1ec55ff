import pytest

from random_programs import random_program
from stagewright.errors import ScheduleError
from stagewright.schedule import Kind, build, insert_communication, verify
from stagewright.schedule.action import COMPUTE, RECEIVES, Action


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


def test_what_is_lowered_is_not_lowered_again():
    with pytest.raises(ScheduleError, match="already has sends"):
        insert_communication(insert_communication(build("gpipe", 2, 2)))


def test_a_single_rank_needs_no_transfers():
    assert not insert_communication(build("1f1b", 1, 3)).is_lowered
