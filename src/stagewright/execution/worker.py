"""The process of one rank: joins the group that torchrun's environment describes, trains, reports.

Run by `stagewright.execution.launch`, or under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import (
    InputError,
    PlanError,
    RunError,
    StagewrightError,
    StagewrightWarning,
    wants_traceback,
)

if TYPE_CHECKING:
    from stagewright.execution.watch import Watch
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan


RUN_ERRORS: dict[str, type[StagewrightError]] = {one.__name__: one for one in (InputError, PlanError)}
"""Of a rank's errors those that the launcher passes on as they are, by name: what the user gave cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    options = parsed(arguments)
    try:
        work_and_record(options)
    except StagewrightError as error:
        report_failure(options["out"], int(os.environ["RANK"]), error, options["quiet"])
        return 1 if isinstance(error, RunError) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def work_and_record(options: dict[str, Any]) -> None:
    """`work`, whose record rank 0 writes."""
    record = work(**options)
    if record is not None:
        record.save(Path(options["out"]) / "record.json")


def work(
    plan: str,
    out: str,
    data: str | None,
    steps: int | None,
    device: str,
    random_weights: bool,
    timeout: float,
    quiet: bool = False,
    devices: str | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> Any:
    """Train the plan on this rank; the record on rank 0, None elsewhere.

    Raises:
        RunError: the run failed; names the rank, the action and what it waited for.
    """
    import torch

    from stagewright.execution.device import local_device
    from stagewright.planning.plan import load_plan

    warnings.simplefilter("always", StagewrightWarning)  # the command line hides those of libraries
    target = local_device(device)
    loaded = load_plan(plan)
    if devices is not None:
        loaded = loaded.model_copy(update={"devices": tuple(map(int, devices.split(",")))})
    launched = int(os.environ["RANK"])
    if (threads := num_threads(loaded, launched)) is not None:
        torch.set_num_threads(threads)
    with member(out, target, timeout, quiet, loaded.rank_on(launched)) as watch:
        from stagewright.execution.checkpoint import is_due, restore, save
        from stagewright.execution.clock import clock_offset
        from stagewright.execution.metering import metered_steps
        from stagewright.execution.session import Session
        from stagewright.execution.watch import own_store

        session = Session(loaded, target, data, random_weights, watch.at, watch.at)
        results = []
        num_steps = steps or loaded.job.num_steps
        first = restore(session, Path(checkpoint)) if checkpoint is not None and resume else 0
        metered = metered_steps(loaded.job, num_steps, first)
        progress = _Progress(num_steps)
        for step in range(first, num_steps):
            result = session.train_step(step, metered=step in metered)
            results.append(result)
            if launched == 0:
                progress(step, result)
            if checkpoint is not None and is_due(step + 1, num_steps, checkpoint_every):
                save(session, Path(checkpoint), step + 1)
        watch.at("comparing clocks")
        offset = clock_offset(own_store(timeout), watch.rank, watch.num_ranks)
        ranks = gather(session.rank_record(offset).model_dump_json())
    if launched != 0:
        return None
    return _record(loaded, torch, target, results, first, metered, ranks)


def lengths_of(job: Job, steps: range) -> tuple[int, ...]:
    """Tokens per sample of each of `steps`; nothing where all are alike."""
    return tuple(map(job.length_of, steps)) if job.sequence_lengths else ()


def num_threads(plan: Plan, device: int) -> int | None:
    """Threads that the process of a device of the plan's cluster computes with; None where nothing says so."""
    described = plan.cluster.description
    known = described is not None and device < described.num_devices
    return described.device_of(device).num_threads if described is not None and known else None


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


def _record(
    loaded: Any, torch: Any, target: Any, results: list[Any], first: int, metered: set[int], ranks: list[Any]
) -> Any:
    from stagewright.execution.record import Record
    from stagewright.version import __version__

    lengths = lengths_of(loaded.job, range(first, first + len(results)))
    timed = loaded.at_length(max(lengths)) if lengths else loaded
    return Record(
        stagewright=__version__,
        model=loaded.model.name,
        first_step=first,
        device=str(target),
        versions={"torch": torch.__version__, "python": sys.version.split()[0]},
        losses=tuple(_finite(result.loss) for result in results),
        gradient_norms=tuple(_finite(result.gradient_norm) for result in results),
        step_seconds=tuple(result.seconds for result in results),
        sequence_lengths=lengths,
        metered_steps=tuple(sorted({0, *(step - first for step in metered)})),
        predicted_step_seconds=timed.predictions.step_seconds,
        ranks=tuple(ranks),
    )


def _finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


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


class _Progress:
    """One line per step on stderr, at most one a second when steps are short."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.printed = 0.0

    def __call__(self, step: int, result: Any) -> None:
        now = time.monotonic()
        if 0 < step < self.num_steps - 1 and self.num_steps > 50 and now - self.printed < 1.0:
            return
        self.printed = now
        print(
            f"step {step + 1}/{self.num_steps}  loss {result.loss:.4f}  gradient norm {result.gradient_norm:.3f}  "
            f"{result.seconds:.3f} s",
            file=sys.stderr,
            flush=True,
        )


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


def parsed(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of this process as those of `work`."""
    parser = argparse.ArgumentParser(prog="python -m stagewright.execution.worker", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--out", required=True)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--devices", help="device of every rank, instead of the plan's")
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="leave it to the launcher to print what failed")
    return vars(parser.parse_args(arguments))


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


if __name__ == "__main__":
    start_process()
    end_process(main())
