"""The device that a rank's process computes on.

Importing this module does not import torch: to start ranks on CPUs takes none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stagewright.errors import InputError, nearest
from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    import torch

ASKED = ("cpu", "cuda", "auto")
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which NCCL 2.30 and later let ranks share a GPU, which is slow and good for trying out pipelines."""


def kind_of(kind: str, plan: Plan, num_ranks_here: int) -> str:
    """Resolve `kind` to ``cpu`` or ``cuda``; ``auto`` is ``cuda`` where the plan is for GPUs and this machine has any.
    Raises `InputError` for an unknown kind, or if this machine has fewer GPUs than ranks to run and they may not share."""
    if kind not in ASKED:
        raise InputError(f"--device {kind}{nearest(kind, ASKED)}: give cpu, cuda or auto")
    if kind == "cpu" or (kind == "auto" and plan.cluster.kind != "cuda"):
        return "cpu"
    from stagewright.execution.accelerator import num_devices

    available = num_devices("cuda")
    if kind == "auto" and not available:
        return "cpu"
    if available < num_ranks_here and not (available and gpus_are_shared()):
        sharing = (
            f", or set {SHARING}=1, by which NCCL 2.30 and later let ranks share a device"
            if available
            else ""
        )
        raise InputError(
            f"NCCL runs one rank per GPU: {num_ranks_here} ranks of the plan run on this machine, which has "
            f"{available} CUDA devices. Plan for as many ranks as there are devices (`stagewright probe --device cuda` "
            f"describes them), or give --device cpu{sharing}"
        )
    return "cuda"


def gpus_are_shared() -> bool:
    """Return whether the user lets several ranks share a GPU."""
    return os.environ.get(SHARING, "0") not in ("", "0")


def local_device(kind: str) -> torch.device:
    """Make this process's device current and return it. Raises `InputError` where there are several GPUs and the launcher
    does not say which one to use, or names one that does not exist."""
    import torch

    from stagewright.execution.accelerator import accelerator_of, num_devices

    if kind == "cpu":
        return torch.device("cpu")
    num_visible, local = num_devices("cuda"), os.environ.get("LOCAL_RANK")
    if local is None and num_visible > 1:
        raise InputError(
            f"this machine has {num_visible} CUDA devices, and LOCAL_RANK does not say which of them is this rank's: set "
            "it, or let each process see its own device only (CUDA_VISIBLE_DEVICES)"
        )
    # Ray, Slurm and others show each process its own device only, and set LOCAL_RANK all the same.
    index = 0 if num_visible == 1 else int(local or 0)
    if num_visible and gpus_are_shared():
        index %= num_visible
    if index >= num_visible:
        raise InputError(
            f"LOCAL_RANK is {index}, but this process sees {num_visible} CUDA devices: start as many ranks on a machine as "
            "it has, or let each process see its own device only (CUDA_VISIBLE_DEVICES)"
        )
    # Before CUDA starts: with more streams than queues (8 by default), some streams wait for others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = torch.device("cuda", index)
    accelerator_of(device).make_current()
    return device
