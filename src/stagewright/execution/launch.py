"""`run`: train a plan on this machine, or join a launcher that is already running."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from stagewright.errors import InputError, RunError, nearest
from stagewright.execution.checkpoint_folder import Checkpointing, Kept, check_start, steps_of
from stagewright.execution.data.prepared import Data, prepared, ready_beside
from stagewright.execution.data.request import DataRequest
from stagewright.execution.folder_lock import in_use
from stagewright.execution.joining import check_launcher
from stagewright.execution.left import plan_to_run, plan_without
from stagewright.execution.no_number import ON_NAN, OnNan
from stagewright.execution.processes import start_ranks
from stagewright.execution.record import Record, load_record
from stagewright.execution.weight_files import check_weights
from stagewright.machine import machine_bytes
from stagewright.planning.assignment.rank_file import read_rank_file
from stagewright.planning.plan import Plan
from stagewright.schedule.action import Action, Kind
from stagewright.text import one_line
from stagewright.units import format_bytes, format_seconds


def run(
    plan: str | Path,
    data: DataRequest | str | Path | Sequence[str | Path] | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    random_weights: bool = False,
    timeout: float = 1800.0,
    start_timeout: float = 300.0,
    ranks: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    other_data: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    held_out: Data = None,
    evaluate_every: int | None = None,
    adapt: bool = False,
    replan: bool = False,
    tensorboard: str | Path | None = None,
    wandb: str | None = None,
    rates: Mapping[str, Any] | None = None,
    on_nan: OnNan = "warn",
    compare: bool = True,
) -> Record | None:
    """Train exactly what a plan says; one process per rank.

    Under a launcher (RANK and WORLD_SIZE are set) this process is one of the ranks; otherwise the processes are started
    here. Ctrl-C or SIGTERM stops them behind the present step, with a checkpoint if a folder for checkpoints was given; a
    second one ends them at once.

    Args:
        plan: path of a ``plan.json``.
        data: text (bytes are tokens), records, ``.npy`` of token ids or a token store; several are mixed; a `DataRequest`
            says more. None makes synthetic samples.
        steps: number of optimizer steps; None takes the job's.
        out: folder for ``record.json``; None makes ``runs/<model>-<time>``.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA where the plan is for GPUs and this machine has any.
        random_weights: start from the seed even where weights lie beside the model's config.
        timeout: seconds a rank may stay at one action.
        start_timeout: seconds until every rank must have joined the others.
        ranks: a rank file that says which device each rank has; None takes the plan's.
        checkpoint: folder for checkpoints, of which one is written after the last step.
        checkpoint_every: steps after which one more is written each time.
        resume: go on from the newest one in that folder; `steps` are counted from the first of all.
        other_data: do so also if the data is not what that one was trained on.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: keep those after a multiple of so many steps besides.
        held_out: data that is evaluated, every sample of it once, at the end.
        evaluate_every: and after every so many steps.
        adapt: go on under another plan where ranks stay slower or faster than planned, or links slower, and that is worth
            it.
        replan: where there are fewer processes or devices than the plan has ranks, plan again for those that are left, and
            go on from the newest checkpoint; of processes that are started here also when one is killed.
        tensorboard: folder for the figures of every step, for TensorBoard.
        wandb: project of Weights & Biases that they go to.
        rates: keys of the job that say the learning rate, in place of those of the plan's.
        on_nan: what a step does whose loss or gradients are no finite numbers: its update as ever (``warn``), nothing
            (``skip``), end the run (``stop``), or go back to the newest checkpoint and on with later data (``rollback``).
        compare: compare the traced graph with the model before the first run of it.

    Returns:
        What was measured, `stopped_by` a signal or not; None on the ranks of a launcher that are not the first.

    Raises:
        InputError: the plan cannot be read, or is one that is predicted only; there are too few devices, too little memory
            for processes on the CPU, or no folder to write to, or another run has it.
        RunError: a rank failed; names the rank and the action.
    """
    from stagewright.execution.device import kind_of

    check_launcher()
    check_options(keep_last, keep_every, held_out, evaluate_every, on_nan, checkpoint)
    if replan and ranks is not None:
        raise InputError("--replan and --ranks: a rank file is for one number of ranks; give one of them")
    checkpoints = None if checkpoint is None else Path(checkpoint)
    begun = plan_to_run(plan, replan, checkpoints, device, start_timeout)
    loaded = begun.plan.model_copy(update={"job": begun.plan.job.with_rates(steps, **(rates or {}))})
    refuse_what_is_not_run(loaded, str(plan))
    resume = resume or goes_on(checkpoints, begun.is_replanned)
    kept = None if keep_last is None else Kept(keep_last, keep_every)
    asked = Checkpointing(checkpoints, checkpoint_every, resume, other_data, kept)
    asked.check()
    check_weights(loaded, random_weights, resume)
    folder = default_folder(loaded) if out is None else Path(out)
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    # Of all ranks of the plan, or those that a launcher says it starts here.
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched else loaded.num_ranks
    kind = kind_of(device, loaded, num_here)
    if kind == "cpu" and not is_launched:
        refuse_without_room(loaded)
    options: dict[str, Any] = {
        "plan": str(begun.path), "out": str(folder), "data": None,
        "steps": steps, "device": kind, "random_weights": random_weights, "timeout": timeout,
        "start_timeout": start_timeout, "checkpoint": None if checkpoint is None else str(checkpoint),
        "checkpoint_every": checkpoint_every, "resume": resume, "keep_last": keep_last, "keep_every": keep_every,
        "held_out": None, "evaluate_every": evaluate_every,
        "tensorboard": None if tensorboard is None else str(tensorboard), "wandb": wandb, "adapt": adapt,
        "rates": dict(rates or {}), "on_nan": on_nan, "compare": compare,
    }  # fmt: skip
    if ranks is not None:
        devices = read_rank_file(ranks, loaded.cluster.load(), loaded.num_ranks)
        loaded = loaded.model_copy(update={"devices": devices})
        options["devices"] = devices
    num_steps = steps or loaded.job.num_steps
    with in_use(checkpoint, "--checkpoint"):
        found = prepared(DataRequest.of(data), loaded)
        check_start(asked, loaded, num_steps, None if found is None else found.identity, random_weights)
        aside = ready_beside(held_out, found, loaded)
        options["data"] = None if found is None else found.model_dump(mode="json")
        options["held_out"] = None if aside is None else aside.model_dump(mode="json")
        with in_use(folder, "--out"):
            if is_launched:
                return _join(options, folder)
            if sys.stderr.isatty():
                print(starting(loaded, kind, num_steps), file=sys.stderr, flush=True)
            while True:
                try:
                    return _start(loaded, options, folder, start_timeout)
                except RunError as error:
                    if not (replan and error.lost and checkpoints is not None and steps_of(checkpoints)):
                        raise
                    print(f"stagewright: {error}", file=sys.stderr, flush=True)
                    lost = [loaded.devices[rank] if loaded.devices else rank for rank in error.lost]
                    rest = plan_without(loaded, lost, checkpoints)
                    loaded = rest.plan
                    options |= {"plan": str(rest.path), "devices": None, "resume": True}
                    if kind == "cpu":
                        refuse_without_room(loaded)
                    again = replace(asked, is_resumed=True)
                    check_start(
                        again, loaded, num_steps, None if found is None else found.identity, random_weights
                    )


def start_plan(
    plan: Plan, module: str, arguments: Sequence[str], start_timeout: float, can_stop: bool = True
) -> None:
    """`stagewright.execution.processes.start_ranks` for the ranks of a plan, each on the device that it has there."""
    ranks = [plan.rank_on(device) for device in range(plan.num_ranks)]
    start_ranks(module, arguments, ranks, start_timeout, can_stop)


def check_options(
    keep_last: int | None,
    keep_every: int | None,
    held_out: Data,
    evaluate_every: int | None,
    on_nan: str,
    checkpoint: str | Path | None,
) -> None:
    """Raises `InputError` where one would be ignored, or is unknown."""
    if on_nan not in ON_NAN:
        raise InputError(f"--on-nan {on_nan}{nearest(on_nan, ON_NAN)}: give one of {', '.join(ON_NAN)}")
    if on_nan == "rollback" and checkpoint is None:
        raise InputError(
            "--on-nan rollback needs --checkpoint FOLDER, where there is something to go back to"
        )
    if evaluate_every is not None and held_out is None:
        raise InputError("--evaluate-every needs --held-out PATH, the data to evaluate")
    if keep_every is not None and keep_last is None:
        raise InputError("--keep-every needs --keep-last N: without it all checkpoints are kept")


def default_folder(plan: Plan) -> Path:
    """Where a run of `plan` leaves its files if nobody says where: a folder in ``runs``, whatever the model is called."""
    name = one_line(PurePath(plan.model.name).name).lstrip(".")[:50] or "run"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def goes_on(checkpoints: Path | None, is_replanned: bool) -> bool:
    """Whether this run was planned again for what is left, or a launcher has started it again after a failure, and it can go
    on from a checkpoint of its own."""
    is_again = is_replanned or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return is_again and checkpoints is not None and bool(steps_of(checkpoints))


def starting(plan: Plan, kind: str, num_steps: int) -> str:
    """What is about to be done, for those who wait for the first step."""
    ranks = f"{plan.num_ranks} process{'es' * (plan.num_ranks > 1)}"
    each = format_seconds(plan.predictions.step_seconds)
    return f"starting {ranks} on {kind}: {plan.model.name}, {num_steps} steps, predicted at {each} each"


def refuse_what_is_not_run(plan: Plan, source: str) -> None:
    """Before any process is started. Raises `InputError` where the plan is one that is predicted only; `source` is where it
    came from."""
    if plan.cp > 1:
        raise InputError(f"{source}: context parallelism is predicted, not run: plan without --cp")
    if plan.ep > 1:
        raise InputError(f"{source}: expert parallelism is predicted, not run: plan without --ep")
    if plan.job.not_run is not None:
        raise InputError(f"{source}: {plan.job.not_run}")
    plan.job.check_whole(plan.tp, max(plan.sharding, default=0))
    if any(Action.parse(text).kind is Kind.STEP for actions in plan.program for text in actions):
        raise InputError(
            f"{source}: schedule '{plan.schedule}' updates weights in the middle of a batch and keeps several versions of "
            "them, which is predicted, not run: plan with a schedule that updates once per batch, such as --schedule 1f1b"
        )


def refuse_without_room(plan: Plan) -> None:
    """Before the processes of a plan are started on the CPU of this machine, all of them: the system would not refuse them
    memory but end one of them, or of somebody else's, when there is no more. Raises `InputError` where their predicted
    peaks together are more than the machine has."""
    replicas = plan.dp * plan.tp
    needed = replicas * sum(rank.allocated_peak_bytes + rank.host_bytes for rank in plan.predictions.ranks)
    available = machine_bytes()
    if needed > available:
        raise InputError(
            f"the {plan.num_ranks} ranks of the plan need {format_bytes(needed)} of memory, and as processes on the CPU of "
            f"this machine they have {format_bytes(available)} together: run the plan on {plan.cluster.name}, for "
            "which it was made, or plan for this machine, which `stagewright probe` describes"
        )


def _join(options: dict[str, Any], folder: Path) -> Record | None:
    from stagewright.execution.worker import work

    work(**options)
    return load_record(folder / "record.json") if os.environ["RANK"] == "0" else None


def _start(plan: Plan, options: dict[str, Any], folder: Path, start_timeout: float) -> Record:
    began = time.time()
    start_plan(plan, "stagewright.execution.worker", [json.dumps(options)], start_timeout)
    record = folder / "record.json"
    if not record.exists() or record.stat().st_mtime < began - 1:
        raise RunError(f"the run ended without a record in '{folder}'")
    return load_record(record)
