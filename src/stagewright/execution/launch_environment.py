"""The environment in which a `Trainer` joins a run: the launcher's plan, the device, and a run of one rank without a
launcher. Nothing here imports torch before the kind of device is needed."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.errors import InputError
from stagewright.execution.rendezvous import STARTED_HERE
from stagewright.planning.plan import Plan

PLAN = "STAGEWRIGHT_PLAN"
"""Environment variable with the path of the plan that `stagewright launch` was given."""
START_TIMEOUT = "STAGEWRIGHT_START_TIMEOUT"
"""Environment variable with the seconds within which every rank must join."""
_START_TIMEOUT_S = 300.0


def plan_of(plan: Plan | str | Path | None) -> Plan | str | Path:
    """Return `plan`, or else the path of the launcher's plan. Raises `InputError` where there is none."""
    path = plan or os.environ.get(PLAN)
    if path is None:
        raise InputError(
            "a Trainer needs a plan: give the path of a plan.json, or start the script with stagewright launch"
        )
    return path


_COUNTS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)
"""Environment variables in which a launcher sets whole numbers."""


def check_launcher() -> None:
    """Raise `InputError` where a launcher's environment variables have impossible values."""
    for name in _COUNTS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise InputError(
                f"the environment has {name}={value!r}: a launcher sets a whole number there; correct or unset it"
            )
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        raise InputError(
            f"the environment has RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']}: ranks begin at 0, "
            "and each is below the number of processes; correct or unset both"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if STARTED_HERE not in os.environ and not os.environ.get(name):
            raise InputError(
                f"the environment has RANK and WORLD_SIZE, and no {name}: set it to where the first rank is, or unset both "
                "to have the processes started here"
            )


def start_timeout_s(start_timeout: float | None) -> float:
    """Return the seconds within which every rank must join: `start_timeout`, or else the launcher's, or the default."""
    if start_timeout is not None:
        return start_timeout
    value = os.environ.get(START_TIMEOUT)
    try:
        seconds = _START_TIMEOUT_S if value is None else float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InputError(f"the environment has {START_TIMEOUT}={value!r}: give seconds above 0, or unset it")
    return seconds


def kind_of_device(kind: str, plan: Plan) -> str:
    """Return the type of this process's device, with `kind` ``auto`` resolved."""
    if kind != "auto":
        return kind
    from stagewright.execution.accelerator import num_devices
    from stagewright.execution.device import kind_of

    shows_own_device_only = num_devices("cuda") == 1
    num_here = 1 if shows_own_device_only else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return kind_of(kind, plan, num_here)


@contextmanager
def launched(plan: Plan) -> Iterator[None]:
    """Set the environment of a rank during the context: a launcher's, or that of the only rank. Raises `InputError` where
    no launcher has started this process and the plan has several ranks."""
    if "RANK" in os.environ:
        yield
        return
    if plan.num_ranks > 1:
        raise InputError(
            f"the plan needs {plan.num_ranks} processes: start the script with `stagewright launch PLAN "
            f"SCRIPT` or `torchrun --nproc-per-node {plan.num_ranks} SCRIPT`"
        )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(_free_port())
    os.environ.update(alone)
    try:
        yield
    finally:
        for name in alone:
            os.environ.pop(name, None)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
