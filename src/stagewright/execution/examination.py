"""The examination of `stagewright doctor`: devices, links between them, versions, memory, and faults that fail a run."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
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
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME", "LOCAL_RANK")
"""Variables that decide how ranks find their GPUs and each other."""
_OPTIONAL = {"pyarrow": "data", "peft": "lora", "bitsandbytes": "qlora"}
"""Packages that some data and models need, each with the extra of Stagewright that installs it."""


@dataclass(frozen=True)
class Trouble:
    """A fault of this machine and its remedy; not fatal if only some runs fail."""

    what: str
    remedy: str
    is_fatal: bool = False


@dataclass(frozen=True)
class Examination:
    """The facts about this machine, by name, and its faults."""

    facts: list[tuple[str, str]]
    troubles: list[Trouble]

    def document(self) -> dict[str, Any]:
        return {"facts": dict(self.facts), "troubles": [asdict(trouble) for trouble in self.troubles]}


def examine() -> Examination:
    """Examine this machine without starting processes or allocating device memory."""
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
    variables = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    facts.append(
        ("environment", ", ".join(f"{name}={value}" for name, value in variables.items()) or "as it is")
    )
    num_gpus = sum(name.startswith("GPU ") for name, _ in devices)
    interfaces = [name for _, name in socket.if_nameindex()]
    troubles = [
        *_of_gpus(bool(devices)), *_of_peers(), *_of_environment(variables, num_gpus, interfaces), *_of_memory(shared),
        *_of_folders(), *_of_packages(),
    ]  # fmt: skip
    return Examination(facts, sorted(troubles, key=lambda trouble: not trouble.is_fatal))


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
    """Return a line for each GPU, and one with the number of pairs that reach each other's memory directly."""
    devices, facts = _gpus(), []
    for device in devices:
        free, total = accelerator_of(device).free_and_total_bytes()
        name = device_name(device)
        facts.append(
            (f"GPU {device.index}", f"{name}, {format_bytes(total)}, {format_bytes(free)} of it free")
        )
    if len(devices) > 1:
        num_pairs = len(devices) * (len(devices) - 1)
        direct = num_pairs - len(_indirect_pairs())
        facts.append(("links", f"{direct} of {num_pairs} pairs of GPUs reach each other directly"))
    return facts


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(num_devices("cuda"))]


def _indirect_pairs() -> list[tuple[torch.device, torch.device]]:
    """Return the ordered pairs of GPUs whose first cannot access the memory of the second."""
    pairs = ((device, other) for device in _gpus() for other in _gpus() if device != other)
    return [(device, other) for device, other in pairs if not can_reach(device, other)]


def _of_peers() -> list[Trouble]:
    pairs = _indirect_pairs()
    if not pairs:
        return []
    what = f"{len(pairs)} pairs of GPUs, such as {pairs[0][0].index} and {pairs[0][1].index}, exchange data through the host"
    return [Trouble(what, "Measure their links with `stagewright probe --device cuda` and plan for them")]


def _of_environment(variables: Mapping[str, str], num_gpus: int, interfaces: Sequence[str]) -> list[Trouble]:
    """Return the faults of environment variables that misdirect or slow down ranks on GPUs."""
    if num_gpus == 0:
        return []
    troubles = []
    local = variables.get("LOCAL_RANK", "")
    if num_gpus > 1 and local.isdecimal() and int(local) >= num_gpus:
        troubles.append(
            Trouble(
                f"LOCAL_RANK is {local}, and the process sees {num_gpus} GPUs (0 to {num_gpus - 1})",
                "Start as many processes on each node as it has GPUs, or let each process see only its own GPU",
                True,
            )
        )
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        troubles.append(
            Trouble(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, so transfers and gathers wait for computations issued before them",
                "Unset it, or set it to 32",
            )
        )
    wanted = variables.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not any(_is_named(name, wanted) for name in interfaces):
        troubles.append(
            Trouble(
                f"NCCL_SOCKET_IFNAME is '{wanted}', and this machine has only {', '.join(interfaces)}",
                "Name one of them, or unset it",
                True,
            )
        )
    return troubles


def _is_named(interface: str, wanted: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME includes an interface.

    Source: NCCL's documentation of its environment variables: prefixes separated by commas; ``^`` in front of the list
    excludes, ``=`` takes whole names.

    >>> [_is_named("eth0", wanted) for wanted in ("eth", "=eth", "=eth0,ib0", "^docker,lo", "^eth", "ib")]
    [True, False, True, True, False, False]
    """
    excludes, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    is_whole, names = wanted.startswith("="), wanted.removeprefix("=").split(",")
    is_listed = interface in names if is_whole else interface.startswith(tuple(filter(None, names)))
    return is_listed is not excludes


def _of_gpus(has_gpus: bool) -> list[Trouble]:
    troubles = []
    if not dist.is_available() or not dist.is_gloo_available():
        troubles.append(
            Trouble(
                "this torch has no gloo, so processes cannot connect",
                "Install PyTorch's official wheel",
                True,
            )
        )
    has_driver = shutil.which("nvidia-smi") is not None
    if has_driver and not has_gpus:
        why = "is built for CPUs" if torch.version.cuda is None else "cannot reach the GPUs"
        remedy = (
            "Install PyTorch's CUDA wheel"
            if torch.version.cuda is None
            else "Compare the driver with its CUDA"
        )
        troubles.append(Trouble(f"there is an NVIDIA driver, and this torch {why}", remedy))
    if has_gpus and not dist.is_nccl_available():
        troubles.append(
            Trouble("this torch has no NCCL for its GPUs", "Install PyTorch's official wheel for Linux", True)
        )
    return troubles


def _of_memory(shared: int | None) -> list[Trouble]:
    troubles = []
    if free_bytes() < _LEAST_FREE:
        troubles.append(
            Trouble(
                f"only {format_bytes(free_bytes())} of memory are free, and each torch process takes about 0.5 GiB",
                "End other programs, or plan for fewer processes",
            )
        )
    if shared is not None and shared < _LEAST_SHARED:
        troubles.append(
            Trouble(
                f"only {format_bytes(shared)} of {_SHARED} are free, where NCCL and data loaders exchange buffers between "
                "processes (Docker gives 64 MiB)",
                "Start the container with --shm-size=8g or --ipc=host",
            )
        )
    return troubles


def _of_folders() -> list[Trouble]:
    troubles = []
    try:
        folder = cache_folder("traces")
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
        if free < _LEAST_DISK:
            troubles.append(
                Trouble(
                    f"only {format_bytes(free)} are free in '{folder}'", "Make room, or set STAGEWRIGHT_CACHE"
                )
            )
    except (InputError, OSError) as error:
        troubles.append(Trouble(f"the cache cannot be written ({error})", "Set STAGEWRIGHT_CACHE", True))
    return troubles


def _of_packages() -> list[Trouble]:
    troubles = []
    for name, extra in _OPTIONAL.items():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            troubles.append(
                Trouble(
                    f"{name} is not installed, which some runs need", f"pip install 'stagewright[{extra}]'"
                )
            )
    return troubles
