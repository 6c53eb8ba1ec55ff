"""A process that is one rank of a group: how it joins, what it says when it fails, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import InputError, PlanError, RunError, StagewrightError, wants_traceback

if TYPE_CHECKING:
    from stagewright.execution.watch import Watch

RUN_ERRORS: dict[str, type[StagewrightError]] = {one.__name__: one for one in (InputError, PlanError)}
"""Of a rank's errors those that the launcher passes on as they are, by name: what the user gave cannot be used."""


def start_process() -> None:
    """For a process that is nothing but a rank: Ctrl-C ends it at once, and nothing it prints is on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also while it is blocked in a transfer
    warnings.showwarning = _show
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _show(message: Warning | str, *_: Any) -> None:
    print(f"warning: rank {os.environ['RANK']}: {message}", file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """End such a process at once: threads of libraries that still wait would abort an interpreter that takes itself down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def member(out: str, target: Any, timeout: float, quiet: bool, rank: int | None = None) -> Iterator[Watch]:
    """Inside, this process is a rank of the group and watched; an error says which rank failed at what.

    Args:
        out: folder for what this rank has to say when it fails.
        target: the `torch.device` of this rank.
        timeout: seconds a rank may stay at one action.
        quiet: leave it to the launcher to print what failed.
        rank: of this process in the plan; that of the launcher where they are the same.
    """
    import torch.distributed as dist

    from stagewright.execution.heap import keep_freed_memory
    from stagewright.execution.watch import Watch, group_store, host_store, own_store

    if target.type == "cpu":
        keep_freed_memory()
    launched, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = launched if rank is None else rank

    def end(message: str) -> None:
        try:
            report_failure(out, launched, RunError(message), quiet)
        finally:
            os._exit(1)

    host = host_store()
    watch = Watch(rank, world, own_store(), timeout, on_failure=end)
    watch.listen_for_termination()
    dist.init_process_group(
        "nccl" if target.type == "cuda" else "gloo",
        store=group_store(timeout),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    watch.start()
    try:
        yield watch
    except Exception as error:
        raise _failure(error, rank, watch) from error
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()
    del host


def _failure(error: Exception, rank: int, watch: Any) -> StagewrightError:
    """What this rank should say: its own error, or which other rank's end caused it."""
    own = str(error) if isinstance(error, StagewrightError) else f"{type(error).__name__}: {error}"
    position = watch.position
    blamed = watch.blame() if may_be_lost_peer(error) else None
    if blamed is None:
        watch.failed(own)
        kind = RUN_ERRORS.get(type(error).__name__, RunError)
        return kind(f"rank {rank} failed at {position}: {own}")
    return RunError(f"{blamed}; rank {rank} stopped at {position}: {own}")


def may_be_lost_peer(error: BaseException | None) -> bool:
    """Whether a transfer or a collective may be behind `error`: they raise `RuntimeError`.

    >>> may_be_lost_peer(ValueError("no such token"))
    False
    """
    while error is not None:
        if isinstance(error, RuntimeError):
            return True
        error = error.__cause__
    return False


def report_failure(out: str, rank: int, error: StagewrightError, quiet: bool) -> None:
    """Leave the error for the launcher that asked this rank to be `quiet`; otherwise print it."""
    trace = "".join(traceback.format_exception(error)) if wants_traceback() else ""
    if not quiet:
        print(f"{trace}stagewright: {error}", file=sys.stderr, flush=True)
        return
    said = {"rank": rank, "time": time.time(), "kind": type(error).__name__, "message": str(error)}
    print(trace, end="", file=sys.stderr, flush=True)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".failure-{rank}").write_text(json.dumps(said))


def gather(document: str) -> list[Any]:
    """Every rank's JSON document, in the order of ranks, on the launcher's rank 0; nothing elsewhere."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.tensor(list(document.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(gathered, padded)
    if os.environ.get("RANK", "0") != "0":
        return []
    return [
        json.loads(bytes(item[: int(size)].tolist()).decode())
        for item, size in zip(gathered, sizes, strict=True)
    ]
