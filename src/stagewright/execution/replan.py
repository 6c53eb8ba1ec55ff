"""Replanning for the remaining devices of a run; the new plans are stored with its checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from stagewright.errors import RunError
from stagewright.execution.heartbeat import Board, StoreBoard
from stagewright.execution.launch_environment import plan_of, start_timeout_s
from stagewright.execution.options import RunOptions
from stagewright.execution.rendezvous import has_own_store, own_seal, own_store
from stagewright.files import digest_of
from stagewright.planning.plan import Plan, given_plan, load_plan
from stagewright.units import format_seconds

_LOOK_S = 0.2
_POSTED = "plan for what is left"
"""Place on the board of the digest of the new plan's file."""


@dataclass(frozen=True)
class PlanToRun:
    """The plan of a run, its file if it has one, and whether it is a replacement for the remaining devices."""

    plan: Plan
    path: Path | None
    is_replanned: bool = False


def plan_to_run(options: RunOptions) -> PlanToRun:
    """Return the plan of the options; with `replan`, and fewer processes of a launcher, or GPUs of this machine, than the
    plan has ranks, a plan for those. The launcher's first rank makes it, and the others wait for it.

    Raises:
        InputError: the plan cannot be read.
        PlanError: no plan fits the remaining devices.
        RunError: the first rank has made no plan within the start timeout.
    """
    source = plan_of(options.plan)
    plan = given_plan(source)
    path = None if isinstance(source, Plan) else Path(source).resolve()
    checkpoints = options.checkpoint_folder
    if not options.replan or checkpoints is None:
        return PlanToRun(plan, path)
    num_left = _num_left(plan, options.device)
    if num_left >= plan.num_ranks:
        return PlanToRun(plan, path)
    place = _place(plan, num_left, checkpoints)
    wait_s = start_timeout_s(options.start_timeout)
    board = _board(wait_s)
    if int(os.environ.get("RANK", "0")) == 0:
        place.unlink(missing_ok=True)  # of an earlier start
        begun = plan_without(plan, range(num_left, plan.num_ranks), checkpoints)
        if board is not None:
            board.write(_POSTED, digest_of(place))
        return begun
    began = time.monotonic()
    while not _is_posted(place, board):
        if time.monotonic() - began > wait_s:
            raise RunError(
                f"the first rank has written no plan for {num_left} ranks to '{place}' in {wait_s:.0f} s: the folder of "
                "--checkpoint must be on a file system that all machines share"
            )
        time.sleep(_LOOK_S)
    return PlanToRun(load_plan(place), place, is_replanned=True)


def _board(wait_s: float) -> Board | None:
    """Return the board on which the first rank posts the digest of its plan; None where there is no store before the ranks
    join, whose sessions then compare their plans."""
    return StoreBoard(own_store(wait_s), own_seal()) if has_own_store() else None


def _is_posted(place: Path, board: Board | None) -> bool:
    """Return whether the file at `place` is the plan that the first rank has written in this start."""
    if board is None:
        return place.exists()
    posted = board.read(_POSTED)
    return posted is not None and place.exists() and digest_of(place) == posted


def plan_without(plan: Plan, lost: Collection[int], checkpoints: Path) -> PlanToRun:
    """Plan for the devices of `plan` without those `lost`, save the result with the checkpoints, and report it on stderr."""
    from stagewright.planning.replanning import replanned_without

    num_left = plan.num_ranks - len(lost)
    if not num_left:
        raise RunError("no device of the plan remains")
    unused = range(plan.num_ranks, plan.cluster.num_devices)
    began = time.monotonic()
    replacement = replanned_without(plan, {*lost, *unused})
    place = _place(plan, num_left, checkpoints)
    replacement.save(place)
    print(
        f"stagewright: {num_left} of {plan.num_ranks} ranks remain: planned again in "
        f"{format_seconds(time.monotonic() - began)}: {_shape(replacement)}, a step predicted at "
        f"{format_seconds(replacement.predictions.step_seconds)} instead of "
        f"{format_seconds(plan.predictions.step_seconds)} with {_shape(plan)} ({place})",
        file=sys.stderr,
        flush=True,
    )
    return PlanToRun(replacement, place, is_replanned=True)


def _num_left(plan: Plan, device: str) -> int:
    """Return the number of the launcher's processes, or of GPUs of this machine; if unknown, the plan's number of ranks."""
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    from stagewright.execution.accelerator import num_devices

    num_gpus = num_devices("cuda") if device != "cpu" and plan.cluster.kind == "cuda" else 0
    return num_gpus or plan.num_ranks


def _place(plan: Plan, num_left: int, checkpoints: Path) -> Path:
    """Return the path of the new plan's file, different for every original plan, so that another run's file is not used."""
    from stagewright.execution.checkpoint_folder import digest

    return checkpoints.resolve() / f"plan-on-{num_left}-{digest(plan.model_dump(mode='json'))[:8]}.json"


def _shape(plan: Plan) -> str:
    degrees = [f"pp {plan.pp}", f"dp {plan.dp}", *([f"tp {plan.tp}"] if plan.tp > 1 else [])]
    return f"{', '.join(degrees)}, {plan.schedule}"
