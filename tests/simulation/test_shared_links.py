"""Links that the ranks of a node share."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from random_programs import random_program
from stagewright.errors import InputError, ScheduleError
from stagewright.schedule import Program, build, insert_communication
from stagewright.simulation import Contention, SharedLinks, StageCosts, simulate, transfer_times


def random_pipeline(seed):
    program, edges = random_program(seed)
    rng = np.random.default_rng(seed)
    costs = StageCosts.of(
        *rng.uniform(0.1, 3.0, (3, program.num_stages)), backward_s=rng.uniform(0.1, 6.0, program.num_stages)
    )
    table = rng.uniform(0.0, 4.0, (program.num_stages, program.num_stages))
    return program, edges, costs, lambda source, target: float(table[source, target])


def one_node(num_ranks):
    return SharedLinks((0,) * num_ranks, (0,) * num_ranks, (0,) * num_ranks)


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_within_a_node_both_engines_give_the_same_times(seed, lowered):
    program, edges, costs, transfers = random_pipeline(seed)
    if lowered:
        program = insert_communication(program, edges, ahead=seed % 3)
    plain = simulate(program, costs, transfers, edges=edges)
    timed = simulate(program, costs, transfers, edges=edges, shared=one_node(program.num_ranks))
    assert np.array_equal(plain.start_s, timed.start_s) and np.array_equal(plain.end_s, timed.end_s)
    assert np.array_equal(plain.token_s, timed.token_s)


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_shared_link_carries_one_transfer_at_a_time(seed, lowered):
    program, edges, costs, transfers = random_pipeline(seed)
    if lowered:
        program = insert_communication(program, edges)
    links = SharedLinks.of_nodes(program.num_ranks, 2)
    timeline = simulate(program, costs, transfers, edges=edges, shared=links)
    moves, placed = transfer_times(timeline), program.placement.rank_of_stage
    on_link = defaultdict(list)
    for source, target, start, end in zip(
        moves.source_stage, moves.target_stage, moves.start_s, moves.end_s, strict=True
    ):
        sender, receiver = placed[source], placed[target]
        if links.node_of_rank[sender] != links.node_of_rank[receiver]:
            for link in (links.sends_on[sender], links.receives_on[receiver]):
                on_link[link].append((start, end))
    for spans in on_link.values():
        for before, after in pairwise(sorted(spans)):
            assert after[0] >= before[1] - 1e-9
    free = simulate(program, costs, 0.0, edges=edges, contention=Contention.NONE)
    assert timeline.makespan_s >= free.makespan_s - 1e-9


def starts(timeline, rank):
    return {str(event.action): event.start_s for event in timeline.events(rank)}


def skipping() -> Program:
    """Four stages of which 0 and 1 feed 2 and 3."""
    text = "program skip\nmicrobatches 1\nplacement 0 1 2 3\n"
    return Program.from_text(text + "\n".join(f"{s}: {s}F0 {s}B0" for s in range(4)) + "\n")


def test_ranks_of_a_node_share_its_adapters():
    edges = [(0, 2), (1, 3)]
    costs = StageCosts.uniform(4)

    def both(adapters):
        links = SharedLinks.of_nodes(4, 2, adapters)
        timeline = simulate(skipping(), costs, 4.0, edges=edges, shared=links)
        return starts(timeline, 2)["2F0"], starts(timeline, 3)["3F0"]

    assert both(adapters=1) == (5, 9)
    assert both(adapters=2) == (5, 5)


def test_a_node_receives_one_transfer_at_a_time():
    # ranks 0 and 1 on nodes of their own, both send to the node of ranks 2 and 3
    links = SharedLinks((0, 1, 2, 2), (0, 1, 2, 2), (3, 4, 5, 5))
    timeline = simulate(skipping(), StageCosts.uniform(4), 4.0, edges=[(0, 2), (1, 3)], shared=links)
    assert (starts(timeline, 2)["2F0"], starts(timeline, 3)["3F0"]) == (5, 9)


def test_a_deadlock_is_found_in_time_too():
    text = "program stuck\nmicrobatches 1\nplacement 0 1\n0: 0B0 0F0\n1: 1F0 1B0\n"
    with pytest.raises(ScheduleError, match=r"rank 0 is blocked at 0B0"):
        simulate(Program.from_text(text), StageCosts.uniform(2), shared=SharedLinks.of_nodes(2, 1))


def test_links_must_fit_the_program():
    with pytest.raises(InputError, match="links of 2 ranks for a program of 4"):
        simulate(build("gpipe", 4, 2), StageCosts.uniform(4), shared=SharedLinks.of_nodes(2, 1))
    with pytest.raises(InputError, match="either contention or shared links"):
        simulate(build("gpipe", 2, 2), StageCosts.uniform(2), contention=Contention.NONE, shared=one_node(2))
    with pytest.raises(InputError, match="name for each rank"):
        SharedLinks((0, 0), (0,), (0, 0))
