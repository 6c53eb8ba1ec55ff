"""Every family, over random sizes: the program verifies, lowers, and survives being written and read."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.errors import ScheduleError
from stagewright.schedule import (
    BUILDERS,
    Program,
    build,
    insert_communication,
    read_torch_csv,
    verify,
    write_torch_csv,
)

SEARCHED = {"zb-auto", "v-half", "v-min"}
LOOPED = {"interleaved-1f1b", "interleaved-zb", "breadth-first", "greedy"}


@pytest.mark.parametrize("name", sorted(BUILDERS))
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 6), st.integers(1, 13), st.integers(1, 3))
def test_programs_verify_lower_and_round_trip(name, num_ranks, num_microbatches, num_chunks):
    chunks = num_chunks if name in LOOPED else 2 * num_chunks if name == "hanayo" else None
    options = {"num_moves": 20} if name in SEARCHED else {}
    program = verify(build(name, num_ranks, num_microbatches, chunks, **options))
    lowered = verify(insert_communication(program))
    for each in (program, lowered):
        assert Program.from_text(each.to_text()) == each
        assert Program.from_document(each.to_document()) == each
    assert lowered.compute_only() == program.compute_only()
    read = read_torch_csv(write_torch_csv(program), program.name)
    assert read == program.compute_only()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "breadth-first"])
def test_split_backwards_merge_to_the_plain_family(name):
    split = build(name, 3, 5, split_backward=True).lines()
    assert [re.sub(r"(\d+)I(\d+) \1W\2\b", r"\1B\2", line) for line in split] == build(name, 3, 5).lines()


def test_overlapped_pairs_round_trip():
    program = verify(build("dualpipe-v", 4, 10, overlap=True))
    assert "&" in program.to_text()
    assert Program.from_text(program.to_text()) == program
    assert read_torch_csv(write_torch_csv(program), program.name) == program
    apart = program.with_ranks(
        (part for action in actions for part in action.parts) for actions in program.ranks
    )
    assert verify(apart) == build("dualpipe-v", 4, 10)
    verify(insert_communication(program))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f2b", 2, 2), {}, "did you mean '1f1b'"),
        (("1f1b", 0, 2), {}, "at least one rank"),
        (("1f1b", 2, 0), {}, "at least one microbatch"),
        (("1f1b", 2, 2, 2), {}, "places 1 stage on each rank: leave out num_chunks=2"),
        (("breadth-first", 2, 2, 0), {}, "at least one rank and one chunk"),
        (("gpipe", 2, 2), {"split_backwards": True}, "did you mean 'split_backward'"),
        (("hanayo", 2, 2, 3), {}, "must be even"),
        (("interleaved-1f1b", 4, 8), {"round_size": 3}, "set round_size to 4 or more"),
        (("breadth-first", 2, 5), {"num_groups": 2}, "do not divide"),
        (("zb-auto", 4, 4), {"memory_limit": 0.5}, "fits a memory limit of 0.5"),
    ],
)
def test_impossible_requests_say_what_to_change(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        build(*arguments, **options)


def test_groups_hold_fewer_microbatches():
    assert build("breadth-first", 2, 4, num_groups=2).lines()[0] == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 " + (
        "0F2 0F3 2F2 2F3 2B2 2B3 0B2 0B3"
    )
