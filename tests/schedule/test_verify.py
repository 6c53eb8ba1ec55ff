import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import Action, Program, build, insert_communication, verify


def program(*lines: str, placement: str = "0 1", microbatches: int = 1) -> Program:
    ranks = "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))
    return Program.from_text(f"program test\nmicrobatches {microbatches}\nplacement {placement}\n{ranks}\n")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0F0 0B0", "1F0 0B0"), "stage 0 is placed on rank 0"),
        (("0F0 0B0", "1F0 1B0 2F0"), "names stage 2"),
        (("0F0 0B0", "1F0 1B0 1F1"), "microbatch outside"),
        (("0F0 0B0", "1F0"), "0 B, 0 I and 0 W"),
        (("0F0 0B0 0W0", "1F0 1B0"), "1 B, 0 I and 1 W"),
        (("0F0 0F0 0B0", "1F0 1B0"), "occurs 2 times"),
        (("0B0 0F0", "1F0 1B0"), "needs the saved values of stage 0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "values saved for the weight gradient"),
        (("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "posted receive of the gradient"),
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "0RECV_B0 is missing"),
        (("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0>1", "1RECV_F0 1F0 1B0 1SEND_B0"), "too often"),
    ],
)
def test_broken_programs_are_refused_with_the_reason(lines, message):
    with pytest.raises(ScheduleError, match=message):
        verify(program(*lines))


def test_a_deadlock_names_every_blocked_rank_and_what_it_waits_for():
    stuck = program("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0", microbatches=2)
    with pytest.raises(ScheduleError) as error:
        verify(stuck)
    assert "rank 0 is blocked at 0B0, which waits for gradient of stage 1 for stage 0 of microbatch 0" in str(
        error.value
    )
    assert "rank 1 is blocked at 1F1, which waits for value of stage 0 for stage 1 of microbatch 1" in str(
        error.value
    )


def test_crossed_blocking_sends_are_a_deadlock():
    crossed = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    with pytest.raises(ScheduleError, match=r"(?s)0SEND_F1.*1SEND_B0"):
        verify(crossed)


def test_receives_in_another_order_than_the_sends_are_refused():
    swapped = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    with pytest.raises(ScheduleError, match="receive in the order of the sends"):
        verify(swapped)


def test_a_skip_connection_must_be_sent():
    edges = [(0, 1), (1, 2), (0, 2)]
    plain = build("1f1b", 3, 4)
    verify(insert_communication(plain, edges), edges)
    with pytest.raises(ScheduleError, match=r"0SEND_F0>2 is missing"):
        verify(insert_communication(plain), edges)
    assert Action.parse("2RECV_F0<0") in insert_communication(plain, edges).actions(2)
