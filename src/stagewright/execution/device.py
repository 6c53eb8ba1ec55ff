"""Which device the process of a rank computes on."""

from __future__ import annotations

import os

import torch

from stagewright.errors import InputError, nearest
from stagewright.execution.accelerator import accelerator_of, num_devices
from stagewright.planning.plan import Plan

ASKED = ("cpu", "cuda", "auto")


def kind_of(asked: str, plan: Plan, num_ranks_here: int) -> str:
    """``cpu`` or ``cuda``: what is asked for; with ``auto`` a GPU where the plan is for GPUs and this machine has any.
    Raises `InputError` where there is no such kind, or there are fewer GPUs than the ranks that this machine is to run."""
    if asked not in ASKED:
        raise InputError(f"--device {asked}{nearest(asked, ASKED)}: give cpu, cuda or auto")
    available = num_devices("cuda")
    if asked == "cpu" or (asked == "auto" and not (available and plan.cluster.kind == "cuda")):
        return "cpu"
    if available < num_ranks_here:
        raise InputError(
            f"NCCL runs one rank per GPU: {num_ranks_here} ranks of the plan are to run on this machine, which has "
            f"{available} CUDA devices. Plan for as many ranks as there are devices (`stagewright probe --device cuda` "
            "describes them), or give --device cpu"
        )
    return "cuda"


def local_device(kind: str) -> torch.device:
    """Return the device of this process, which is its current one from now on. Raises `InputError` where there are several
    GPUs and the launcher does not say which is this process's, or it says one that is not there."""
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
    if index >= num_visible:
        raise InputError(
            f"LOCAL_RANK is {index}, but this process sees {num_visible} CUDA devices: start as many ranks on a machine as "
            "it has, or let each process see its own device only (CUDA_VISIBLE_DEVICES)"
        )
    # Before CUDA starts: of more streams than queues, which are 8 by default, some wait for others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = torch.device("cuda", index)
    accelerator_of(device).make_current()
    return device
