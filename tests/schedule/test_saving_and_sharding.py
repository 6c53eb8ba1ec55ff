import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import (
    Action,
    Kind,
    Program,
    build,
    insert_communication,
    insert_gathers,
    insert_recomputation,
    insert_reductions,
    verify,
)


def one_rank(line: str, microbatches: int, placement: str) -> Program:
    return Program.from_text(f"program test\nmicrobatches {microbatches}\nplacement {placement}\n0: {line}\n")


def count(program: Program, kind: Kind) -> int:
    return sum(action.kind is kind for action in program)


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_chunks"), [(2, 4, 3), (4, 8, 4), (3, 5, 2)])
def test_breadth_first_gathers_once_per_pass_and_depth_first_once_per_round(
    num_ranks, num_microbatches, num_chunks
):
    sizes = (num_ranks, num_microbatches, num_chunks)
    breadth = insert_gathers(build("breadth-first", *sizes))
    # the last two stages of the forward pass are still held when the backward pass begins
    assert count(breadth, Kind.GATHER) == num_ranks * (2 * num_chunks - min(2, num_chunks))
    depth = insert_gathers(build("interleaved-1f1b", *sizes))
    if num_chunks > 2:
        assert count(depth, Kind.GATHER) > count(breadth, Kind.GATHER)
    for program in (breadth, depth):
        verify(insert_communication(insert_reductions(program)))
        assert count(program, Kind.GATHER) == count(program, Kind.RELEASE)


def test_gathers_never_exceed_the_buffers():
    for num_buffers in (1, 2, 3):
        for actions in insert_gathers(build("interleaved-1f1b", 2, 6, 4), num_buffers).ranks:
            held = 0
            for action in actions:
                held += (action.kind is Kind.GATHER) - (action.kind is Kind.RELEASE)
                assert 0 <= held <= num_buffers
            assert held == 0


def test_reductions_once_per_stage_or_whenever_the_buffer_is_needed():
    program = build("interleaved-1f1b", 2, 8, 3)
    assert count(insert_reductions(program), Kind.REDUCE) == 6
    tight = insert_reductions(program, num_buffers=1)
    assert count(tight, Kind.REDUCE) == 2 * 3 * 4
    verify(tight)


def test_a_gradient_after_the_last_reduction_is_refused():
    with pytest.raises(ScheduleError, match="move 0REDUCE after it"):
        verify(one_rank("0F0 0F1 0B0 0REDUCE 0B1", 2, "0"))


def test_work_without_its_weights_is_refused():
    with pytest.raises(ScheduleError, match="gathered weights of stage 0"):
        verify(one_rank("0GATHER 0F0 0RELEASE 0B0", 1, "0"))


def test_recomputation_goes_before_every_backward():
    program = verify(insert_communication(insert_recomputation(build("zb-h1", 3, 4), [0, 2])))
    for rank, actions in enumerate(program.ranks):
        recomputed = [action for action in actions if action.kind is Kind.R]
        assert len(recomputed) == (0 if rank == 1 else 4)
    without = Program.from_text(program.to_text().replace("0R1 ", ""))
    with pytest.raises(ScheduleError, match="saved values of stage 0"):
        verify(without)


def test_programs_of_earlier_versions_that_offload_are_refused():
    for text in ("0OFFLOAD0", "12FETCH3"):
        with pytest.raises(ScheduleError, match=f"'{text}': .* no OFFLOAD and FETCH any more; plan again"):
            Action.parse(text)
