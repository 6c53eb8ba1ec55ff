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

from stagewright.errors import InputError, RunError, StagewrightError
from stagewright.execution.checkpoint_folder import Checkpointing, check_start
from stagewright.execution.folder_lock import in_use
from stagewright.execution.machine_memory import refuse_without_room
from stagewright.execution.member import RUN_ERRORS
from stagewright.execution.record import Record, load_record
from stagewright.execution.weight_files import check_weights
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.rank_file import read_rank_file
from stagewright.schedule.action import Action, Kind
from stagewright.units import format_seconds


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
    other_data: bool = False,
) -> Record | None:
    """Train exactly what a plan says; one process per rank.

    Under a launcher (RANK and WORLD_SIZE are set) this process is one of the ranks; otherwise the processes are started
    here with torchrun's launcher.

    Args:
        plan: path of a ``plan.json``.
        data: a text (bytes are tokens) or ``.npy`` of token ids; None makes synthetic samples.
        steps: number of optimizer steps; None takes the job's.
        out: folder for ``record.json``; None makes ``runs/<model>-<time>``.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA where the plan is for GPUs and this machine has any.
        random_weights: start from the seed even where weights lie beside the model's config.
        timeout: seconds a rank may stay at one action.
        ranks: a rank file that says which device each rank has; None takes the plan's.
        checkpoint: folder for checkpoints, of which one is written after the last step.
        checkpoint_every: steps after which one more is written each time.
        resume: go on from the newest one in that folder; `steps` are counted from the first of all.
        other_data: do so also if the data is not what that one was trained on.

    Returns:
        What was measured; None on the ranks of a launcher that are not the first.

    Raises:
        InputError: the plan cannot be read, or is one that is predicted only; there are too few devices, too little memory
            for processes on the CPU, or no folder to write to, or another run has it.
        RunError: a rank failed; names the rank and the action.
    """
    from stagewright.execution.device import kind_of

    loaded = load_plan(plan)
    refuse_what_is_not_run(loaded, str(plan))
    check_weights(loaded, random_weights, resume)
    asked = Checkpointing(
        None if checkpoint is None else Path(checkpoint), checkpoint_every, resume, other_data
    )
    asked.check()
    folder = (
        Path(out)
        if out is not None
        else Path("runs") / f"{loaded.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    kind = kind_of(device, loaded, _num_ranks_here(loaded, is_launched))
    if kind == "cpu" and not is_launched:
        refuse_without_room(loaded)
    options = {"data": data, "steps": steps, "device": kind, "timeout": timeout}
    options |= {"checkpoint": checkpoint, "checkpoint-every": checkpoint_every}
    arguments = [str(Path(plan).resolve()), "--out", str(folder)]
    arguments += [f"--{name}={value}" for name, value in options.items() if value is not None]
    if ranks is not None:
        found = read_rank_file(ranks, loaded.cluster.load(), loaded.num_ranks)
        arguments += [f"--devices={','.join(map(str, found))}"]
    arguments += ["--random-weights"] if random_weights else []
    arguments += ["--resume"] if resume else []
    num_steps = steps or loaded.job.num_steps
    with in_use(checkpoint, "--checkpoint"):
        check_start(asked, loaded, num_steps, data)
        with in_use(folder, "--out"):
            if is_launched:
                return _join(arguments, folder)
            if sys.stderr.isatty():
                print(starting(loaded, kind, num_steps), file=sys.stderr, flush=True)
            return _start(loaded, arguments, folder)


def starting(plan: Plan, kind: str, num_steps: int) -> str:
    """What is about to be done, for those who wait for the first step."""
    ranks = f"{plan.num_ranks} process{'es' * (plan.num_ranks > 1)}"
    each = format_seconds(plan.predictions.step_seconds)
    return f"starting {ranks} on {kind}: {plan.model.name}, {num_steps} steps, predicted at {each} each"


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


def _num_ranks_here(plan: Plan, is_launched: bool) -> int:
    """Ranks that this machine is to run: all of the plan, or those that a launcher says it starts here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched else plan.num_ranks


def _join(arguments: list[str], folder: Path) -> Record | None:
    from stagewright.execution.worker import parsed, work_and_record

    work_and_record(parsed(arguments))
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
            raise _explained(error, folder) from None
        except SignalException as received:
            if received.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise


def _silence(*prefixes: str) -> None:
    """No log lines of the launcher; each of its loggers has a level of its own."""
    for name in [*prefixes, *logging.root.manager.loggerDict]:
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _explained(error: Any, folder: Path) -> StagewrightError:
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
        kind = RUN_ERRORS.get(messages[0].get("kind", ""), RunError)
        return kind(f"the run stopped: {messages[0]['message']}")
    own = f"rank {rank} ended with {_ending(failure)}"
    if messages:
        return RunError(f"the run stopped: {own}: {messages[0]['message']}")
    return RunError(f"the run stopped: {own} (process {failure.pid}), and no rank had anything to say")


def _ending(failure: Any) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    if -failure.exitcode == signal.SIGKILL:
        return (
            "SIGKILL (if nobody sent it, the system had run out of memory: its log says so; then plan with a smaller "
            "--memory-limit, or run fewer ranks here)"
        )
    return failure.signal_name()


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
