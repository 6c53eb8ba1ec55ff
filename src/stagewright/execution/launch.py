"""`run`: train a plan on this machine, or join a launcher that is already running."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from stagewright.errors import InputError, RunError
from stagewright.execution.checkpoint_folder import check_start
from stagewright.execution.record import Record, load_record
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.rank_file import read_rank_file
from stagewright.schedule.action import Action, Kind


def run(
    plan: str | Path,
    data: str | Path | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    random_weights: bool = False,
    timeout: float = 1800.0,
    ranks: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> Record | None:
    """Train exactly what a plan says; one process per rank.

    Under a launcher (RANK and WORLD_SIZE are set) this process is one of the ranks; otherwise the processes are started
    here with torchrun's launcher.

    Args:
        plan: path of a ``plan.json``.
        data: a text (bytes are tokens) or ``.npy`` of token ids; None makes synthetic samples.
        steps: number of optimizer steps; None takes the job's.
        out: folder for ``record.json``; None makes ``runs/<model>-<time>``.
        device: ``cpu``, ``cuda`` or ``auto``.
        random_weights: start from the seed even where weights lie beside the model's config.
        timeout: seconds a rank may stay at one action.
        ranks: a rank file that says which device each rank has; None takes the plan's.
        checkpoint: folder for checkpoints, of which one is written after the last step.
        checkpoint_every: steps after which one more is written each time.
        resume: go on from the newest one in that folder; `steps` are counted from the first of all.

    Returns:
        What was measured; None on the ranks of a launcher that are not the first.

    Raises:
        InputError: the plan cannot be read, or is one that is predicted only.
        RunError: a rank failed; names the rank and the action.
    """
    loaded = load_plan(plan)
    refuse_what_is_not_run(loaded, str(plan))
    check_start(checkpoint, loaded, steps or loaded.job.num_steps, checkpoint_every, resume)
    folder = (
        Path(out)
        if out is not None
        else Path("runs") / f"{loaded.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    options = {"data": data, "steps": steps, "device": device, "timeout": timeout}
    options |= {"checkpoint": checkpoint, "checkpoint-every": checkpoint_every}
    arguments = [str(Path(plan).resolve()), "--out", str(folder)]
    arguments += [f"--{name}={value}" for name, value in options.items() if value is not None]
    if ranks is not None:
        found = read_rank_file(ranks, loaded.cluster.load(), loaded.num_ranks)
        arguments += [f"--devices={','.join(map(str, found))}"]
    arguments += ["--random-weights"] if random_weights else []
    arguments += ["--resume"] if resume else []
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(arguments, folder)
    return _start(loaded, arguments, folder)


def refuse_what_is_not_run(plan: Plan, source: str) -> None:
    """Before any process is started.

    Raises:
        InputError: the plan is one that is predicted only; `source` is where it came from.
    """
    if plan.job.not_run is not None:
        raise InputError(f"{source}: {plan.job.not_run}")
    if any(Action.parse(text).kind is Kind.STEP for actions in plan.program for text in actions):
        raise InputError(
            f"{source}: schedule '{plan.schedule}' updates weights in the middle of a batch and keeps several versions of "
            "them, which is predicted, not run: plan with a schedule that updates once per batch, such as --schedule 1f1b"
        )


def _join(arguments: list[str], folder: Path) -> Record | None:
    from stagewright.execution.worker import main

    code = main(arguments)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise RunError(f"rank {os.environ['RANK']} ended with exit code {code}")
    return load_record(folder / "record.json") if os.environ["RANK"] == "0" else None


def _start(plan: Plan, arguments: list[str], folder: Path) -> Record:
    began = time.time()
    start_ranks(plan.num_ranks, "stagewright.execution.worker", arguments, folder)
    record = folder / "record.json"
    if not record.exists() or record.stat().st_mtime < began - 1:
        raise RunError(f"the run ended without a record in '{folder}'")
    return load_record(record)


def start_ranks(num_processes: int, module: str, arguments: list[str], folder: Path) -> None:
    """Run ``python -m module *arguments --quiet`` once per rank with torchrun's launcher and wait for all.

    Args:
        folder: where ranks that fail leave their last words.

    Raises:
        RunError: a rank failed; says which, and why.
        KeyboardInterrupt: Ctrl-C; all ranks have been ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for stale in folder.glob(".failure-*"):
        stale.unlink()
    _silence("torch.distributed.elastic", "torch.distributed.launcher")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    with _environment(OMP_NUM_THREADS=str(max((os.cpu_count() or 1) // num_processes, 1))):
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments, "--quiet")
        except ChildFailedError as error:
            raise RunError(_explain(error, folder)) from None
        except SignalException as received:
            if received.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise


def _silence(*prefixes: str) -> None:
    """No log lines of the launcher; each of its loggers has a level of its own."""
    for name in [*prefixes, *logging.root.manager.loggerDict]:
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _explain(error: Any, folder: Path) -> str:
    """What the first rank to fail said, or how it ended when it could say nothing."""
    messages = []
    for file in folder.glob(".failure-*"):
        with contextlib.suppress(OSError, ValueError):
            messages.append(json.loads(file.read_text()))
        file.unlink(missing_ok=True)
    messages.sort(key=lambda item: item["time"])
    rank, failure = error.get_first_failure()
    said = any(item["rank"] == rank for item in messages)
    if said or (messages and failure.exitcode > 0):
        return f"the run stopped: {messages[0]['message']}"
    own = f"rank {rank} ended with {_ending(failure)}"
    if messages:
        return f"the run stopped: {own}: {messages[0]['message']}"
    return f"the run stopped: {own} (process {failure.pid}); what the other ranks saw is above"


def _ending(failure: Any) -> str:
    return failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    """Set variables that are not set, for the processes started meanwhile."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)
