"""Who is blamed when a rank goes: the one that shows no sign of life, also if it never showed any."""

from __future__ import annotations

import itertools
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from patience import Deadline
from stagewright.errors import RunError
from stagewright.execution import watchdog
from stagewright.execution.heartbeat import (
    Board,
    Failure,
    FileBoard,
    Liveness,
    Post,
    Seal,
    StoreBoard,
    places,
    read_post,
    write_post,
)
from stagewright.execution.rendezvous import hosted_store, own_store
from stagewright.execution.watchdog import JOINING, Limits, Watchdog

LIMITS = Limits(action_s=60.0, start_s=0.05)


@pytest.fixture(params=["folder", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """On one machine, and under a launcher of others."""
    monkeypatch.setattr(watchdog, "_BLAME_WITHIN_S", 0.3)
    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.02)
    monkeypatch.setattr(watchdog, "_SETTLE_S", 0.1)
    seal = Seal("secret")
    return (
        FileBoard(tmp_path / "board", places(2), seal)
        if request.param == "folder"
        else StoreBoard(dist.HashStore(), seal)
    )


def watching(board: Board, said: list[str] | None = None) -> Watchdog:
    return Watchdog(0, 2, board, LIMITS, (said if said is not None else []).append)


def test_a_rank_that_was_never_heard_of_is_blamed(board: Board) -> None:
    assert (watching(board).blame() or "").startswith("rank 1 died or froze at the start")


def test_a_rank_that_fell_silent_is_blamed_where_it_stood(board: Board) -> None:
    write_post(board, 1, Post(7, "1F3"))
    assert (watching(board).blame() or "").startswith("rank 1 died or froze at 1F3")


def test_ranks_that_go_on_are_not_blamed(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, look = itertools.count(1), Liveness.look

    def beating(self: Liveness, ranks: list[int]) -> float:
        write_post(board, 1, Post(next(beats), "1F3"))
        return look(self, ranks)

    monkeypatch.setattr(Liveness, "look", beating)
    assert watching(board).blame() is None


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(closed.getsockname()[1]))
        with pytest.raises(
            RunError, match=r"store at 127.0.0.1:\d+ did not answer within 1 s .*rank 0 was started"
        ):
            own_store(1.0)


def test_a_host_without_an_address_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(host: str, port: object) -> None:
        asked.append(host)
        if len(asked) > 1:
            time.sleep(30)  # as where no name server answers
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("stagewright.execution.rendezvous._ASK_AGAIN_S", 0.01)
    monkeypatch.setattr("stagewright.execution.rendezvous.socket.getaddrinfo", unknown)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "0")
    for store in (own_store, hosted_store):
        asked.clear()
        with pytest.raises(
            RunError, match=r"'no-such-host.invalid', which had no address within 0 s .*not known"
        ):
            store(0.2)


def test_the_limit_of_an_action_does_not_hold_before_the_first_step(board: Board) -> None:
    watched = Watchdog(0, 1, board, Limits(action_s=1.0, start_s=300.0), lambda _: None)
    watched.at("importing torch")
    watched._since -= 200.0
    assert watched._own_problem() is None
    watched._since -= 200.0
    assert "before its first step" in (watched._own_problem() or "")
    watched.num_steps = 0
    watched.at("0F0")
    watched._since -= 2.0
    assert "longer than the limit of an action" in (watched._own_problem() or "")


def test_who_has_not_joined_is_named(board: Board) -> None:
    said: list[str] = []
    watched = watching(board, said)
    write_post(board, 1, Post(1, "importing torch"))
    watched.at(JOINING)
    watched.start()
    deadline = Deadline(10)
    while not said and deadline:
        time.sleep(0.02)
    assert said and "rank 1 is still at 'importing torch'" in said[0]


def test_a_rank_that_ends_with_its_own_error_does_not_blame_those_that_end_for_it(board: Board) -> None:
    said: list[str] = []
    watched = watching(board, said)
    watched.start()
    watched.failed("InputError", "no room on the disk")
    told = Failure("RunError", "rank 0 failed: no room on the disk", time.time(), is_consequence=True)
    write_post(board, 1, Post(1, "1F3", failure=told))
    watched._thread.join(10)
    post = read_post(board, 0)
    assert said == [] and not watched._thread.is_alive()
    assert post is not None and post.failure is not None and post.failure.kind == "InputError"


def test_time_in_which_nobody_could_look_is_held_against_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z, or on a machine that was busy: silence counts only while this process could have heard a word."""
    board = FileBoard(tmp_path / "board", places(1), Seal("secret"))
    now = [100.0]
    monkeypatch.setattr("stagewright.execution.heartbeat.time.monotonic", lambda: now[0])
    looking = Liveness(board, interval_s=0.25)
    write_post(board, 0, Post(1, "0F0"))
    looking.look([0])
    now[0] += 3600.0
    assert looking.look([0]) == pytest.approx(3600.0, abs=1.0) and looking.problem() is None
    for _ in range(60):
        now[0] += 0.25
        looking.look([0])
    assert "rank 0 died or froze at 0F0" in (looking.problem() or "")


def test_ranks_that_cannot_connect_are_named_once_both_are_there(board: Board) -> None:
    watched = watching(board)
    watched.at("connecting ranks 0 and 1", meets=(0, 1))
    write_post(board, 1, Post(1, "tracing"))
    assert not watched._cannot_connect(500.0)
    write_post(board, 1, Post(2, "connecting ranks 0 and 1"))
    assert not watched._cannot_connect(500.0 + watchdog.CONNECT_S)
    assert watched._cannot_connect(510.0 + watchdog.CONNECT_S)


def test_an_error_while_connecting_names_the_ranks() -> None:
    positions: list[str] = []
    with (
        pytest.raises(
            RunError, match=r"ranks 3 and 4 cannot reach each other \(no route to host\): check that"
        ),
        watchdog.connecting((3, 4), lambda position, meets: positions.append(position)),
    ):
        raise RuntimeError("no route to host\n  a trace of C++")
    assert positions == ["connecting ranks 3 and 4"]


def test_a_stuck_rank_says_what_its_device_is_at(board: Board) -> None:
    said: list[str] = []
    watched = watching(board, said)
    watched.device_position = lambda: "has finished 0F0 (1 of 8 actions) and waits at 0B0"
    watched.at("end of batch")
    watched._fail("this rank has been at end of batch for 60 s")
    assert "its device has finished 0F0 (1 of 8 actions) and waits at 0B0" in said[0]
