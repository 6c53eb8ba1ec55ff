"""The helper that runs a function on several ranks: it returns, it reports, and it never hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from multiprocess import Failed, RanksFailed, Returned, run_ranks, watch_ranks
from patience import Deadline

pytestmark = pytest.mark.multiprocess


def sum_of_ranks(rank: int, num_ranks: int, offset: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item(), torch.get_num_threads()


def echo(rank: int, num_ranks: int, value: object) -> object:
    return value


def read_environment(rank: int, num_ranks: int) -> tuple[str | None, str]:
    return os.environ.get("STAGEWRIGHT_MARK"), os.getcwd()


def raise_on_one(rank: int, num_ranks: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("rank one gives up")
    dist.all_reduce(torch.ones(1))
    return rank


def die_on_one(rank: int, num_ranks: int) -> int:
    if rank == 1:
        os._exit(7)
    time.sleep(0.3)
    return rank


def wait_for_a_message(rank: int, num_ranks: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.recv(torch.empty(1), src=1 - rank)


TICK = """
import sys, time
while True:
    open(sys.argv[1], "a").write(".")
    time.sleep(0.05)
"""


def start_a_ticker(rank: int, num_ranks: int, path: str) -> None:
    subprocess.run([sys.executable, "-c", TICK, path])


def test_every_rank_returns_its_result_in_rank_order() -> None:
    assert run_ranks(sum_of_ranks, 3, 10) == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]


def test_tensors_travel_both_ways() -> None:
    import torch

    value = {"weight": torch.arange(6.0).reshape(2, 3)}
    for returned in run_ranks(echo, 2, value):
        torch.testing.assert_close(returned, value, rtol=0, atol=0)


def test_ranks_see_the_environment_and_folder_of_the_test(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STAGEWRIGHT_MARK", "here")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(read_environment, 2) == [("here", str(tmp_path))] * 2


def test_starting_ranks_is_quick_once_the_server_is_up() -> None:
    run_ranks(echo, 1, None)
    deadline = Deadline(2)
    run_ranks(echo, 4, None)
    assert deadline, "ranks import torch anew instead of being forked with it"


def test_a_rank_that_raises_fails_the_test_with_its_traceback() -> None:
    deadline = Deadline(30)
    with pytest.raises(RanksFailed, match="ValueError: rank one gives up") as caught:
        run_ranks(raise_on_one, 2)
    assert "rank 1 raised" in str(caught.value)
    assert deadline, "the rank that waited for it was not stopped early"


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    survivor, dead = watch_ranks(die_on_one, 2)
    assert survivor == Returned(0)
    assert isinstance(dead, Failed)
    assert dead.reason == "died with exit code 7"


def test_ranks_that_hang_are_stopped_and_show_where_they_stood() -> None:
    deadline = Deadline(10)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wait_for_a_message, 2, timeout=3)
    assert deadline
    for rank in range(2):
        seconds = re.search(rf"rank {rank} had not returned after (\d+\.\d) s", str(caught.value))
        assert seconds is not None and float(seconds[1]) >= 3
    assert str(caught.value).count("in wait_for_a_message") == 2


def test_what_a_hanging_rank_started_ends_with_it(tmp_path) -> None:
    ticks = tmp_path / "ticks"
    with pytest.raises(RanksFailed):
        run_ranks(start_a_ticker, 1, str(ticks), timeout=3)
    num_ticks = ticks.stat().st_size
    time.sleep(0.5)
    assert ticks.stat().st_size == num_ticks > 0


@pytest.mark.parametrize("function", ["test_multiprocess:echo", echo])
def test_the_function_is_given_as_such_or_by_name(function) -> None:
    assert run_ranks(function, 2, "value") == ["value", "value"]
