import random

import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import Kind, Placement, Program, Rules, build, insert_communication, verify
from stagewright.schedule.action import COMPUTE, RECEIVES, Action
from stagewright.schedule.replay import Replay


def random_program(seed: int) -> tuple[Program, list[tuple[int, int]]]:
    """A valid program: any placement, any skip connections, any order in which its actions could happen."""
    rng = random.Random(seed)
    num_ranks, num_microbatches = rng.randint(1, 4), rng.randint(1, 4)
    holders = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(holders)
    stages = range(len(holders))
    skips = [(a, c) for a in stages for c in stages if c > a + 1 and rng.random() < 0.2]
    edges = [(s, s + 1) for s in stages[:-1]] + skips
    todo: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(holders):
        for m in range(num_microbatches):
            kinds = rng.choice(["FB", "FIW"])
            todo[rank] += [Action(Kind(kind), stage, m) for kind in kinds]
    empty = Program(
        "random", Placement(tuple(holders)), num_microbatches, tuple(() for _ in range(num_ranks))
    )
    rules = Rules.of(empty, edges)
    replay = Replay(empty, rules)
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while any(todo):
        choices = [
            (rank, action)
            for rank in range(num_ranks)
            for action in todo[rank]
            if all(token in replay.held for token in rules.needs(action))
        ]
        rank, action = rng.choice(choices)
        replay.perform(rank, action)
        todo[rank].remove(action)
        ranks[rank].append(action)
    return empty.with_ranks(ranks), edges


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
