"""Runs a function on several ranks, each its own process, as torchrun would start them on one machine.

Ranks are forked from a server that has imported torch and the models already, so that starting one takes
milliseconds. The environment they find is torchrun's: `torch.distributed.init_process_group("gloo")` needs
no further argument. The rendezvous store lives in the test's own process, so no port is ever raced for.

A rank that raises, dies or hangs fails the test, and the failure shows where every rank stood.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from patience import MOST, Deadline, patient

# Imported once, by the server that every rank is forked from.
PRELOAD = [
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.t5.modeling_t5",
    "pytest",
    "stagewright.execution",
    "stagewright.execution.checkpoint",
    "stagewright.execution.record",
    "stagewright.execution.session",
    "stagewright.tracing",
    "stagewright.tracing.models.from_config",
    "uncompared",
]

GRACE_SECONDS = 2.0  # what the others are given to fail by themselves once one rank has failed
DUMP_SECONDS = 2.0  # what hanging ranks are given to write their stacks
LEAVE_SECONDS = 1.0  # what ranks that have reported are given to leave

RankFunction = Callable[..., Any] | str


@dataclass(frozen=True)
class Returned:
    """A rank whose function returned."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """A rank that raised, died or was stopped: `reason` in a line, `detail` its traceback or stack."""

    reason: str
    detail: str


class RanksFailed(AssertionError):
    """At least one rank did not return; the text shows where each of them stood."""


def run_ranks(function: RankFunction, num_ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """The results of `function(rank, num_ranks, *args)` on every rank, in rank order.

    `function` is a module's top-level function or the text `"module:function"`; arguments and results are
    pickled. `timeout` is in seconds of a machine that does nothing else, as all times here. Once a rank has failed, the
    others have two seconds left.

    Raises:
        RanksFailed: a rank raised, died or had not returned in time.
    """
    ends = watch_ranks(function, num_ranks, *args, timeout=timeout, grace=GRACE_SECONDS)
    if any(isinstance(end, Failed) for end in ends):
        raise RanksFailed(_report(function, ends))
    return [end.result for end in ends if isinstance(end, Returned)]


def watch_ranks(
    function: RankFunction, num_ranks: int, *args: Any, timeout: float = 60.0, grace: float | None = None
) -> list[Returned | Failed]:
    """How each rank ended, for tests in which a rank is meant to fail.

    As `run_ranks`, but failures are returned, and the ranks that are left run on for `grace` seconds after
    the first failure, or to `timeout` when that is None.
    """
    payload = pickle.dumps((function, args))
    with _rendezvous(num_ranks) as environment, tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            # One by one, so that the ranks already started are ended if the next one cannot be.
            for rank in range(num_ranks):
                ranks += [_start(rank, num_ranks, payload, environment, Path(folder), timeout)]
            return _collect(ranks, timeout, grace)
        finally:
            _end(ranks)


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pid: int
    connection: Connection
    stack: Path  # where the rank writes its stack on SIGUSR1


@contextmanager
def _rendezvous(num_ranks: int) -> Iterator[dict[str, str]]:
    """The environment of the ranks; it holds while the store it names is alive."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    yield {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Every rank is a client of the store above, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


def forking() -> ForkServerContext:
    """Starts processes that have imported what ranks import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _start(
    rank: int, num_ranks: int, payload: bytes, environment: dict[str, str], folder: Path, timeout: float
) -> _Rank:
    context = forking()
    here, there = context.Pipe()
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    stack = folder / f"rank{rank}"
    process = context.Process(
        target=_rank_main,
        args=(rank, num_ranks, payload, environment, os.getcwd(), stack, timeout, there),
        name=f"rank{rank}",
    )
    process.start()
    there.close()
    assert process.pid is not None, "a started process has an id"
    return _Rank(process, process.pid, here, stack)


def _rank_main(
    rank: int,
    num_ranks: int,
    payload: bytes,
    environment: dict[str, str],
    folder: str,
    stack: Path,
    timeout: float,
    connection: Connection,
) -> None:
    """What a rank does: prepare, call the function, report, and leave when all have reported."""
    os.setpgid(0, 0)  # so that whatever the rank starts ends with it
    signal.alarm(int(timeout * MOST) + 60)  # ends the rank even if the test's own process was killed
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            message = pickle.dumps(Returned(_call(rank, num_ranks, payload)))
        except BaseException:
            connection.send_bytes(pickle.dumps(Failed("raised", traceback.format_exc())))
            return
        connection.send_bytes(message)
        # A rank that leaves early closes sockets that its peers may still be reading from.
        connection.poll(timeout * MOST)


def _call(rank: int, num_ranks: int, payload: bytes) -> Any:
    import torch

    torch.set_num_threads(1)
    function, args = pickle.loads(payload)
    if isinstance(function, str):
        module, _, name = function.partition(":")
        function = getattr(importlib.import_module(module), name)
    return function(rank, num_ranks, *args)


def _collect(ranks: list[_Rank], timeout: float, grace: float | None) -> list[Returned | Failed]:
    """Waits for every rank to report or die; dumps the stacks of those that do neither in time."""
    deadline = first = Deadline(timeout)
    ends: dict[int, Returned | Failed] = {}
    waiting = {rank.connection: number for number, rank in enumerate(ranks)}
    while waiting and (left := deadline.left()) > 0:
        ready = wait(list(waiting), left)
        for number in [waiting.pop(connection) for connection in list(waiting) if connection in ready]:
            ends[number] = _receive(ranks[number])
            if isinstance(ends[number], Failed) and grace is not None:
                deadline = min(deadline, Deadline(grace), key=Deadline.left)
    seconds = time.monotonic() - first.began
    reason = f"had not returned after {seconds:.1f} s and was stopped; it stood at"
    for number, stack in _stacks({number: ranks[number] for number in waiting.values()}).items():
        _kill(ranks[number])
        ends[number] = Failed(reason, stack)
    return [ends[number] for number in range(len(ranks))]


def _receive(rank: _Rank) -> Returned | Failed:
    """What a rank reports, or how it died without a report."""
    try:
        return pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(patient(5))
        return Failed(f"died with exit code {rank.process.exitcode}", rank.stack.read_text())


def _stacks(ranks: dict[int, _Rank]) -> dict[int, str]:
    """The stacks of hanging ranks, which write them on SIGUSR1 even while blocked outside Python."""
    for rank in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    deadline = Deadline(DUMP_SECONDS)
    while deadline and not all(_written(rank.stack) for rank in ranks.values()):
        time.sleep(0.05)
    return {number: rank.stack.read_text() if rank.stack.exists() else "" for number, rank in ranks.items()}


def _written(stack: Path) -> bool:
    return stack.exists() and "<module>" in stack.read_text()


def _end(ranks: list[_Rank]) -> None:
    """Lets the ranks that have reported leave, then kills what is left and all that the ranks started."""
    for rank in ranks:
        rank.connection.close()
    deadline = Deadline(LEAVE_SECONDS)
    for rank in ranks:
        rank.process.join(max(0.0, deadline.left()))
    for rank in ranks:
        _kill(rank)


def _kill(rank: _Rank) -> None:
    """Kills a rank, if it still runs, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.process.kill()  # a rank so young that it leads no group yet
    rank.process.join()


def _report(function: RankFunction, ends: list[Returned | Failed]) -> str:
    """Which ranks failed and how, the ones that raised first: they are the likely cause."""
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    failed = [(rank, end) for rank, end in enumerate(ends) if isinstance(end, Failed)]
    failed.sort(key=lambda item: item[1].reason.startswith("had not"))
    lines = [f"{len(failed)} of {len(ends)} ranks of {name} failed"]
    lines += [f"--- rank {rank} {end.reason}\n{end.detail}" for rank, end in failed]
    return "\n".join(lines)
