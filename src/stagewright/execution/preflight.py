"""Preflight checks of a run: the plan that it executes, and whether this machine can execute it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path, PurePath

from stagewright.errors import InputError
from stagewright.execution.checkpoint_folder import steps_of
from stagewright.execution.launch_environment import check_launcher
from stagewright.execution.options import RunOptions
from stagewright.execution.replan import plan_to_run
from stagewright.execution.weight_files import check_weights
from stagewright.machine import machine_bytes
from stagewright.planning.assignment.rank_file import read_rank_file
from stagewright.planning.plan import Plan
from stagewright.schedule.action import Action, Kind
from stagewright.text import one_line
from stagewright.units import format_bytes


def prepare(options: RunOptions) -> tuple[Plan, RunOptions]:
    """Return the plan to run, with the job and devices of the options, and the options with `plan`, `out` and `resume`
    filled in.

    Raises:
        InputError: the plan cannot be read or run, or its model lacks weights.
        PlanError: no plan fits the remaining devices.
    """
    check_launcher()
    chosen = plan_to_run(options)
    job = chosen.plan.job.with_rates(options.steps, **(options.rates or {}))
    plan = chosen.plan.model_copy(update={"job": job})
    devices = options.ranks
    if isinstance(devices, str | Path):
        devices = read_rank_file(devices, plan.cluster.load(), plan.num_ranks)
    if devices is not None:
        plan = plan.model_copy(update={"devices": tuple(devices)})
    options = replace(
        options,
        plan=chosen.path or chosen.plan,
        ranks=devices,
        out=default_folder(plan) if options.out is None else Path(options.out),
        resume=options.resume or _resumes_by_itself(options, chosen.is_replanned),
    )
    if not options.is_checked:
        refuse_what_is_not_run(plan, str(chosen.path or "the plan"))
        check_weights(plan, options.random_weights, options.resume)
    return plan, options


def default_folder(plan: Plan) -> Path:
    """Return the default folder in ``runs`` for the files of a run, with a safe form of the model's name."""
    name = one_line(PurePath(plan.model.name).name).lstrip(".")[:50] or "run"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resumes_by_itself(options: RunOptions, is_replanned: bool) -> bool:
    """Return whether there is a checkpoint, and this run was planned again or is a launcher's restart after a failure."""
    is_restart = is_replanned or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = options.checkpoint_folder
    return is_restart and folder is not None and bool(steps_of(folder))


def refuse_what_is_not_run(plan: Plan, source: str) -> None:
    """Raise `InputError` if the plan from `source` can only be predicted, not run."""
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
    """Raise `InputError` if the predicted peaks of all ranks, as processes on the CPU of this machine, exceed its memory.
    The system would not refuse the memory but kill one of them, or another process, when it runs out."""
    replicas = plan.dp * plan.tp
    needed = replicas * sum(rank.tensor_peak_bytes + rank.host_bytes for rank in plan.predictions.ranks)
    available = machine_bytes()
    if needed > available:
        raise InputError(
            f"the {plan.num_ranks} ranks of the plan need {format_bytes(needed)} of memory, and as processes on the CPU of "
            f"this machine they have {format_bytes(available)} together: run the plan on {plan.cluster.name}, for "
            "which it was made, or plan for this machine, which `stagewright probe` describes"
        )
