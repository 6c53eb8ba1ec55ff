"""What `stagewright doctor` looks at: devices, links between them, versions, memory, and what a run would fail of."""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.errors import InputError
from stagewright.execution.accelerator import (
    accelerator_of,
    can_reach,
    device_name,
    nccl_version,
    num_devices,
)
from stagewright.files import cache_folder
from stagewright.machine import free_bytes, machine_bytes, num_cores
from stagewright.units import GIB, format_bytes
from stagewright.version import __version__

_SHARED = Path("/dev/shm")
_LEAST_SHARED, _LEAST_FREE, _LEAST_DISK = GIB, 2 * GIB, GIB
_OPTIONAL = {"pyarrow": "data", "peft": "lora"}
"""Packages that some data and models need, and the extra of Stagewright that has each."""


@dataclass(frozen=True)
class Trouble:
    """Something that will not work, or (not fatal) will only for some; and how to mend it."""

    what: str
    remedy: str
    is_fatal: bool = False


@dataclass(frozen=True)
class Examination:
    """Names and values of what this machine has, and what is wrong with it."""

    facts: list[tuple[str, str]]
    troubles: list[Trouble]

    def document(self) -> dict[str, Any]:
        return {"facts": dict(self.facts), "troubles": [asdict(one) for one in self.troubles]}


def examine() -> Examination:
    """Looks at this machine; starts no processes and allocates nothing on a device."""
    facts = [
        (
            "stagewright",
            f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}",
        ),
        ("torch", f"{torch.__version__}, transformers {metadata.version('transformers')}"),
        ("backends", _backends()),
        ("processors", f"{num_cores()} cores, {platform.machine()}"),
        ("memory", f"{format_bytes(machine_bytes())}, {_amount(free_bytes())} of it free"),
    ]
    shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
    if shared is not None:
        facts.append(("shared memory", f"{format_bytes(shared)} free in {_SHARED}"))
    devices = _devices()
    facts += devices or [("GPUs", "none that this torch can use")]
    troubles = [*_of_gpus(bool(devices)), *_of_memory(shared), *_of_folders(), *_of_packages()]
    return Examination(facts, sorted(troubles, key=lambda one: not one.is_fatal))


def _amount(count: float) -> str:
    return "an unknown part" if count == float("inf") else format_bytes(count)


def _backends() -> str:
    if not dist.is_available():
        return "none"
    named = [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    named += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    if (version := nccl_version()) is not None:
        named.append(f"NCCL {version}")
    named += ["gloo"] if dist.is_gloo_available() else []
    return ", ".join(named) or "none"


def _devices() -> list[tuple[str, str]]:
    """A line for each GPU, and how many pairs reach each other's memory directly."""
    devices, found = [torch.device("cuda", index) for index in range(num_devices("cuda"))], []
    for device in devices:
        free, total = accelerator_of(device).free_and_total_bytes()
        name = device_name(device)
        found.append(
            (f"GPU {device.index}", f"{name}, {format_bytes(total)}, {format_bytes(free)} of it free")
        )
    if len(devices) > 1:
        pairs = [(device, other) for device in devices for other in devices if device != other]
        direct = sum(can_reach(device, other) for device, other in pairs)
        found.append(("links", f"{direct} of {len(pairs)} pairs of GPUs reach each other directly"))
    return found


def _of_gpus(has_gpus: bool) -> list[Trouble]:
    found = []
    if not dist.is_available() or not dist.is_gloo_available():
        found.append(
            Trouble("this torch has no gloo, so no processes can meet", "Install PyTorch's own wheel", True)
        )
    has_driver = shutil.which("nvidia-smi") is not None
    if has_driver and not has_gpus:
        why = "is built for CPUs" if torch.version.cuda is None else "cannot reach the GPUs"
        remedy = (
            "Install PyTorch's CUDA wheel"
            if torch.version.cuda is None
            else "Compare the driver with its CUDA"
        )
        found.append(Trouble(f"there is an NVIDIA driver, and this torch {why}", remedy))
    if has_gpus and not dist.is_nccl_available():
        found.append(
            Trouble("this torch has no NCCL for its GPUs", "Install PyTorch's own wheel for Linux", True)
        )
    return found


def _of_memory(shared: int | None) -> list[Trouble]:
    found = []
    if free_bytes() < _LEAST_FREE:
        found.append(
            Trouble(
                f"only {format_bytes(free_bytes())} of memory are free, and a process of torch takes about 0.5 GiB",
                "End other programs, or plan for fewer processes",
            )
        )
    if shared is not None and shared < _LEAST_SHARED:
        found.append(
            Trouble(
                f"only {format_bytes(shared)} of shared memory are free, of which NCCL takes some for every pair of ranks",
                "Start the container with --shm-size=8g",
            )
        )
    return found


def _of_folders() -> list[Trouble]:
    found = []
    try:
        folder = cache_folder("traces")
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
        if free < _LEAST_DISK:
            found.append(
                Trouble(
                    f"only {format_bytes(free)} are free in '{folder}'", "Make room, or set STAGEWRIGHT_CACHE"
                )
            )
    except (InputError, OSError) as error:
        found.append(Trouble(f"the cache cannot be written ({error})", "Set STAGEWRIGHT_CACHE", True))
    return found


def _of_packages() -> list[Trouble]:
    found = []
    for name, extra in _OPTIONAL.items():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(
                Trouble(
                    f"{name} is not installed, which some runs need", f"pip install 'stagewright[{extra}]'"
                )
            )
    return found
