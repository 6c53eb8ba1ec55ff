"""Lanes of transfers: no program that we lower hangs on them, and every planted fault is found."""

from __future__ import annotations

import functools
import re
from itertools import pairwise, product

import numpy as np
import pytest

from random_programs import random_program
from stagewright.errors import ScheduleError
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.plan import DeadlinePolicy, scheduled
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.schedule import (
    BUILDERS,
    Program,
    build,
    insert_communication,
    insert_gathers,
    insert_reductions,
)
from stagewright.schedule.lanes import Lane, check_lanes, lanes_of
from stagewright.schedule.list_scheduler.priorities import UNLIMITED
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.schedule.lower import receives_ahead

LOOPED = {
    "interleaved-1f1b": (2, 3, 4),
    "interleaved-zb": (2, 3, 4),
    "breadth-first": (2, 3, 4),
    "greedy": (2, 3),
}
CHUNKS = {**LOOPED, "hanayo": (2, 4)}
SEARCHED = {"zb-auto", "v-half", "v-min"}


def on_gpus(program, edges=None):
    return insert_communication(program, edges, ahead=receives_ahead(on_gpus=True))


def built(name, num_ranks, num_microbatches, chunks):
    """A built-in program; None for sizes that its builder refuses."""
    options = {"num_moves": 1} if name in SEARCHED else {}
    try:
        return build(name, num_ranks, num_microbatches, chunks, **options)
    except ScheduleError:
        return None


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_no_built_in_program_hangs(name, num_ranks):
    sizes = (num_ranks, 2 * num_ranks, 1, 5) if num_ranks < 8 else (num_ranks, 13)
    programs = [
        program
        for num_microbatches, chunks in product(sizes, CHUNKS.get(name, (None,)))
        if (program := built(name, num_ranks, num_microbatches, chunks)) is not None
    ]
    assert programs
    for program in programs:
        check_lanes(on_gpus(program), waits_for_device=True)


def test_no_random_program_hangs():
    for seed in range(500):
        program, edges = random_program(seed)
        check_lanes(on_gpus(program, edges), edges, waits_for_device=True)


def joint_program(seed):
    """What the joint search's scheduler makes of a random layout under a random rule."""
    rng = np.random.default_rng(seed)
    num_ranks, num_layers = int(rng.integers(2, 6)), int(rng.integers(6, 14))
    table = LayerTable.of(*rng.uniform(0.2, 3.0, (3, num_layers)), boundary_bytes=1.0)
    problem = JointProblem.of(table, num_ranks, int(rng.integers(1, 9)), latency_s=float(rng.uniform(0, 1)))
    layers = [*rng.permutation(num_ranks), *rng.integers(0, num_ranks, num_layers - num_ranks)]
    rule = Rule(
        int(rng.integers(0, 2)), bool(rng.integers(0, 2)), bool(rng.integers(0, 2)),
        float(rng.choice([1.0, 2.0, np.inf])), float(rng.uniform(0, 1)), UNLIMITED, bool(rng.integers(0, 2)), 0.0,
    )  # fmt: skip
    shifts = rng.normal(0, 1, (4, num_layers)) * rng.integers(0, 2)
    plan = scheduled("joint", problem, Layout.of_layers(layers), DeadlinePolicy(rule, shifts))
    assert plan is not None
    return plan.program


def test_no_program_of_the_joint_search_hangs():
    for seed in range(200):
        check_lanes(on_gpus(joint_program(seed)), waits_for_device=True)


def test_gathers_reductions_and_pairs_do_not_hang():
    for name, chunks in (("breadth-first", 3), ("interleaved-1f1b", 2), ("zb-v", None)):
        sharded = insert_reductions(insert_gathers(build(name, 4, 8, chunks)), num_buffers=1)
        check_lanes(on_gpus(sharded), waits_for_device=True)
    paired = build("dualpipe-v", 4, 10, overlap=True)
    check_lanes(on_gpus(paired), waits_for_device=True)


def test_a_lane_carries_one_kind_from_one_rank_to_another():
    lowered = on_gpus(build("1f1b", 3, 3))
    assert [str(lane) for lane in lanes_of(lowered)] == ["B 1>0", "B 2>1", "F 0>1", "F 1>2"]
    assert lanes_of(build("1f1b", 1, 3)) == []


# -- planted faults -------------------------------------------------------------------------------------------


def one_for_both_directions(lane: Lane):
    return lane.kind, *sorted(lane[1:])


def one_for_a_pair_of_ranks(lane: Lane):
    return tuple(sorted(lane[1:]))


def one_for_both_kinds(lane: Lane):
    return lane[1:]


AUDITED = [
    build(name, num_ranks, times * num_ranks, chunks)
    for name, chunks in (
        *(
            (name, None)
            for name in ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")
        ),
        *(("interleaved-1f1b", chunks) for chunks in (2, 4)),
        *(("breadth-first", chunks) for chunks in (2, 4)),
        ("interleaved-zb", 2),
    )
    for num_ranks, times in product((2, 4, 8), (1, 2))
]


@functools.cache
def audited(ahead):
    return [insert_communication(program, ahead=ahead) for program in AUDITED]


def refusals(programs, **design):
    """What `check_lanes` says of those it refuses."""
    words = []
    for program in programs:
        try:
            check_lanes(program, **design)
        except ScheduleError as error:
            words.append(str(error))
    return words


@pytest.mark.parametrize(
    ("ahead", "design", "message", "count"),
    [
        (1, {}, "", 0),
        (1, {"shares": one_for_both_directions}, "deadlocks on GPUs", 34),
        (0, {"shares": one_for_both_directions}, "deadlocks on GPUs", 34),
        (1, {"shares": one_for_both_kinds}, "receive in the order of the sends", 14),
        (1, {"is_warmed_up": False}, "blocks its hosts", 38),
        (0, {"is_warmed_up": False}, "blocks its hosts", 3),
        (1, {"waits_for_device": True}, "can hang on GPUs", 75),
    ],
)
def test_other_designs_of_lanes_hang(ahead, design, message, count):
    words = refusals(audited(ahead), **design)
    assert [text for text in words if message not in text] == []
    assert len(words) == count


def test_a_lane_for_every_pair_of_ranks_deadlocks_1f1b():
    lowered = on_gpus(build("1f1b", 4, 8))
    assert refusals([lowered], shares=one_for_a_pair_of_ranks)


TWO_RANKS = """
    program planted
    microbatches 2
    placement 0 1
    0: {}
    1: {}
"""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            "rank 0 sends rank 1 the values of stage 0 for 1, microbatch 0, where rank 1 receives the values of stage 0 for "
            "1, microbatch 1; receive in the order of the sends",
        ),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1F0 1RECV_F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            "planted deadlocks on GPUs, where the transfers of a lane run in the order issued:\n"
            "  0SEND_F0 (F 0>1) is issued after 1F0 on rank 1\n"
            "  1F0 on rank 1 needs 0SEND_F0 (F 0>1)\n"
            "lower its compute_only() program again",
        ),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            "0SEND_F1 between ranks 0 and 1 has no other end: send and receive every value once",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            "1F1 on rank 1 needs 0SEND_F1 (F 0>1)",
        ),
    ],
    ids=["swapped", "late", "missing", "circle"],
)
def test_planted_orders_are_refused(first, second, message):
    program = Program.from_text(TWO_RANKS.format(first, second))
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_lanes(program)


def test_every_swapped_pair_of_receives_of_a_lane_is_found():
    lowered = on_gpus(build("zb-v", 2, 4))
    actions = list(lowered.actions(1))
    places = [index for index, action in enumerate(actions) if str(action).startswith("1RECV_F")]
    for here, there in pairwise(places):
        swapped = [*actions]
        swapped[here], swapped[there] = swapped[there], swapped[here]
        with pytest.raises(ScheduleError, match="receive in the order of the sends"):
            check_lanes(lowered.with_ranks([lowered.actions(0), swapped]))


def test_a_host_that_waits_for_its_device_is_named_in_the_circle():
    with pytest.raises(ScheduleError) as error:
        check_lanes(insert_communication(build("1f1b", 2, 2)), waits_for_device=True)
    lines = str(error.value).splitlines()
    assert (
        "the host's wait before 0F1 on rank 0 waits for all that was issued, also for 1SEND_B0 (B 1>0)"
        in str(error.value)
    )
    assert lines[-1] == "post every receive right before the computation that uses it (ahead=0)"


def test_sends_wait_for_older_ones_between_the_same_stages():
    sent = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3"
    values = " ".join(f"0F{m} 0SEND_F{m}" for m in range(4))
    received = f"{values} 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0 2RECV_F1 2F1 2RECV_F2 2F2 2RECV_F3 2F3"

    def check(line):
        text = f"program flooded\nmicrobatches 4\nplacement 1 0 1\n0: {sent} {line}\n1: {received}"
        check_lanes(Program.from_text(text))

    check("1RECV_B0 1B0 1SEND_B0 1SEND_F3")
    flooded = (
        "the wait before 1SEND_F3 on rank 0 lets 2 sends be on their way, so it waits for 1SEND_F1 (F 0>1)"
    )
    with pytest.raises(ScheduleError, match=re.escape(flooded)):
        check("1SEND_F3 1RECV_B0 1B0 1SEND_B0")
