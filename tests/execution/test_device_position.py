"""What a device is at while its host is a batch ahead: the first action that has not ended, and what that waits for."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.execution.rank_runner import BatchResult, RankRunner
from stagewright.execution.transport import Channel
from stagewright.schedule.action import Action


@dataclass(frozen=True)
class _Mark:
    is_reached: bool

    def query(self) -> bool:
        return self.is_reached


class _Stuck(RankRunner):
    """The runner of stage 1 of three, whose device has reached the marks given for its first actions."""

    def __init__(self, marks: dict[str, tuple[bool, bool]]) -> None:
        self.actions = [Action.parse(text) for text in ("1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0")]
        self._forward = {(0, 1): Channel("0>1", 4, (), None), (1, 2): Channel("1>2", 6, (), None)}
        self._backward = {(2, 1): Channel("2>1", 6, (), None), (1, 0): Channel("1>0", 4, (), None)}
        self._current = BatchResult(
            marks=[(Action.parse(text), _Mark(start), _Mark(end)) for text, (start, end) in marks.items()]
        )


RECEIVED = {"1RECV_F0": (True, True)}


def test_a_device_that_waits_for_a_message_names_its_sender() -> None:
    position = _Stuck(RECEIVED | {"1F0": (False, False), "1SEND_F0": (False, False)}).device_position()
    assert position == (
        "has finished 1RECV_F0 (1 of 5 actions) and waits at 1F0 for microbatch 0 of stages 0>1 from rank 4"
    )


def test_a_device_that_computes_says_so() -> None:
    position = _Stuck(RECEIVED | {"1F0": (True, False), "1SEND_F0": (False, False)}).device_position()
    assert position == "has finished 1RECV_F0 (1 of 5 actions) and computes 1F0"


def test_a_device_behind_a_send_names_the_rank_that_has_not_received() -> None:
    position = _Stuck(RECEIVED | {"1F0": (True, True), "1SEND_F0": (True, False)}).device_position()
    assert position.endswith("waits at 1SEND_F0 for rank 6 to receive earlier messages of stages 1>2")


def test_a_device_that_is_not_behind_has_nothing_to_say() -> None:
    assert _Stuck(RECEIVED).device_position() == ""
