"""`run`: train a plan on this machine, or join a launcher that is already running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagewright.errors import InputError, RunError
from stagewright.execution.checkpoint_folder import check_start, steps_of
from stagewright.execution.data.prepared import held_out_data, ready
from stagewright.execution.device import kind_of
from stagewright.execution.folder_lock import in_use
from stagewright.execution.launch_environment import start_timeout_s
from stagewright.execution.options import RunOptions, options_as_keywords
from stagewright.execution.preflight import prepare, refuse_without_room
from stagewright.execution.processes import start_ranks
from stagewright.execution.record import Record, load_record
from stagewright.execution.replan import plan_without
from stagewright.planning.plan import Plan
from stagewright.units import format_seconds


@options_as_keywords.function
def run(options: RunOptions) -> Record | None:
    """Train exactly as a plan says, with one process per rank.

    Under a launcher (RANK and WORLD_SIZE are set) this process is one of the ranks; otherwise the processes are started
    here. Ctrl-C or SIGTERM stops them after the present step, with a checkpoint if a folder for checkpoints was given; a
    second signal ends them at once.

    Args:
        options: the fields of a `RunOptions`, as keyword arguments.

    Returns:
        The record of the run, also where a signal stopped it (`stopped_by`); None on a launcher's ranks other than the
        first.

    Raises:
        InputError: the plan cannot be read or is only for prediction; there are too few devices or too little memory for
            processes on the CPU; or a folder cannot be written to or is in use by another run.
        RunError: a rank failed; names the rank and the action.
    """
    if isinstance(options.plan, Plan) or options.callbacks:
        raise InputError(
            "run() starts processes, which take the path of a plan and no callbacks: save the plan and give its path, or "
            "use a Trainer instead"
        )
    plan, options = prepare(options)
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    # All ranks of the plan, or those that the launcher starts on this machine.
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched else plan.num_ranks
    kind = kind_of(options.device, plan, num_here)
    if kind == "cpu" and not is_launched:
        refuse_without_room(plan)
    checkpoints = options.checkpoint_folder
    with in_use(checkpoints, "--checkpoint"):
        data = ready(options.data, plan)
        identity = None if data is None else data.identity
        check_start(options, plan, identity)
        held_out = held_out_data(options.held_out, data, plan)
        options = replace(options, data=data, held_out=held_out, device=kind, is_checked=True)
        with in_use(options.out, "--out"):
            if is_launched:
                return _join(options)
            if sys.stderr.isatty():
                print(starting(plan, kind), file=sys.stderr, flush=True)
            while True:
                try:
                    return _start(plan, options)
                except RunError as error:
                    if not (
                        options.replan and error.lost and checkpoints is not None and steps_of(checkpoints)
                    ):
                        raise
                    print(f"stagewright: {error}", file=sys.stderr, flush=True)
                    lost = [plan.devices[rank] if plan.devices else rank for rank in error.lost]
                    replanned = plan_without(plan, lost, checkpoints)
                    plan = replanned.plan
                    options = replace(options, plan=replanned.path, resume=True)
                    if kind == "cpu":
                        refuse_without_room(plan)
                    check_start(options, plan, identity)


def start_plan(
    plan: Plan, module: str, arguments: Sequence[str], start_timeout: float, can_stop: bool = True
) -> None:
    """Start the ranks of a plan with `stagewright.execution.processes.start_ranks`, each on its device in the plan."""
    ranks = [plan.rank_on(device) for device in range(plan.num_ranks)]
    start_ranks(module, arguments, ranks, start_timeout, can_stop)


def starting(plan: Plan, kind: str) -> str:
    """Return the line that announces a run to a user who waits for the first step."""
    ranks = f"{plan.num_ranks} process{'es' * (plan.num_ranks > 1)}"
    seconds = format_seconds(plan.predictions.step_seconds)
    steps = plan.job.num_steps
    return f"starting {ranks} on {kind}: {plan.model.name}, {steps} steps, predicted at {seconds} each"


def _join(options: RunOptions) -> Record | None:
    from stagewright.execution.worker import work

    work(options)
    return load_record(_record_of(options)) if os.environ["RANK"] == "0" else None


def _start(plan: Plan, options: RunOptions) -> Record:
    began = time.time()
    timeout = start_timeout_s(options.start_timeout)
    start_plan(plan, "stagewright.execution.worker", [options.to_json()], timeout)
    record = _record_of(options)
    if not record.exists() or record.stat().st_mtime < began - 1:
        raise RunError(f"the run ended without a record in '{options.out}'")
    return load_record(record)


def _record_of(options: RunOptions) -> Path:
    assert options.out is not None, "it is filled in"
    return Path(options.out) / "record.json"
