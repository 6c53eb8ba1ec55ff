"""Work on items that several processes share: answers in order, also where a process dies, and no process is left behind."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from stagewright import machine
from stagewright.machine import at_once, worked_out

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that start as copies")
ITEMS = range(23)


def with_process(item: int) -> tuple[int, int]:
    return item * item, os.getpid()


def dying(item: int) -> int:
    if item == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_answers_come_in_order_from_all_processes() -> None:
    answers = list(worked_out(with_process, ITEMS, 3))
    assert [square for square, _ in answers if square is not None] == [item * item for item in ITEMS]
    processes = {process for _, process in answers}
    assert len(processes) == 3 and os.getpid() not in processes


def test_what_a_dead_process_did_not_answer_is_none() -> None:
    answers = list(worked_out(dying, ITEMS, 2))
    lost = {item for item in ITEMS if item >= 6 and item // machine._BLOCK % 2 == 1}
    assert answers == [None if item in lost else item for item in ITEMS]


def test_what_fails_is_none() -> None:
    assert list(worked_out(lambda item: 1 // item, [1, 0, 1], 1)) == [1, None, None]


def test_no_process_outlives_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    forked = machine.forked

    def noted(work: object) -> tuple[int, int]:
        children.append((started := forked(work))[0])  # pyright: ignore[reportArgumentType]
        return started

    monkeypatch.setattr(machine, "forked", noted)
    answers = worked_out(with_process, ITEMS, 2)
    assert next(iter(answers)) is not None
    answers.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_without_further_processes_the_rest_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, num_forks = os.fork, 0

    def failing() -> int:
        nonlocal num_forks
        num_forks += 1
        if num_forks > 1:
            raise BlockingIOError("no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", failing)
    answers = list(worked_out(dying, range(6), 3))
    assert answers == [0, 1, 2, 3, None, None]


def test_a_process_may_be_ended_again() -> None:
    child, answers = machine.forked(lambda stream: None)
    os.close(answers)
    machine.end(child)
    machine.end(child)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


@pytest.fixture
def three_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_more_processes", lambda: 3)


@pytest.mark.usefixtures("three_more_processes")
def test_the_first_work_is_done_here_and_the_next_ones_elsewhere_at_once() -> None:
    answers = list(at_once([partial(with_process, item) for item in range(6)]))
    assert [square for square, _ in answers] == [0, 1, 4, 9, 16, 25]
    processes = [process for _, process in answers]
    assert processes[0] == os.getpid() and len(set(processes)) == 4
    assert processes[4:] == processes[:2]


@pytest.mark.usefixtures("three_more_processes")
def test_what_another_process_does_not_answer_is_worked_out_here() -> None:
    here = os.getpid()

    def only_here(item: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert list(at_once([partial(only_here, item) for item in range(3)])) == [0, 1, 2]


@pytest.mark.usefixtures("three_more_processes")
def test_an_error_in_another_process_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        list(at_once([partial(divmod, 1, 1), partial(divmod, 1, 0)]))
