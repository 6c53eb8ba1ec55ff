"""The accelerator seam: streams, events, memory and random state of the device that a process computes on.

Everything that depends on the kind of device is here, and no other module names torch's device modules. A GPU is driven
through `torch.accelerator` and the device-independent `torch.Stream` and `torch.Event`, so that another kind of device
needs no code elsewhere; what only CUDA (and ROCm, which appears as CUDA) has is in a separate class.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from stagewright.execution.pinned import PinnedArena
from stagewright.machine import free_bytes, machine_bytes


class DeviceEvent(Protocol):
    """A point in the work queued on a stream; `torch.Event` is one."""

    def record(self, stream: Any = None, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Any, /) -> float: ...


class Stream(Protocol):
    """A queue of work on a device, current inside a `with` block; `torch.Stream` is one."""

    def wait_event(self, event: Any, /) -> None: ...
    def wait_stream(self, other: Any, /) -> None: ...
    def record_event(self, event: Any = None, /) -> DeviceEvent: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


class Accelerator(ABC):
    """The device that a process computes on.

    Args:
        device: the device, with its index unless it is the host.
    """

    is_asynchronous: bool
    """Whether work is queued and runs after the call that issues it has returned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_drains = 0
        """Number of times that the host has waited for all work of the device."""

    @abstractmethod
    def make_current(self) -> None:
        """Make this the current device of its kind."""

    # -- streams and events -----------------------------------------------------------------------------------------

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which work is issued now."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return another stream. Torch takes streams in turn from a pool of 32, which process groups use too."""

    @cached_property
    def copy_streams(self) -> tuple[Stream, Stream]:
        """This process's streams for copies to the host and for copies to the device."""
        return self.new_stream(), self.new_stream()

    @abstractmethod
    def event(self, is_timed: bool = False) -> DeviceEvent:
        """Return an event to record; only timed ones have an `elapsed_time`."""

    def mark(self) -> DeviceEvent:
        """Return a timed event that is recorded now, on the current stream."""
        event = self.event(is_timed=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until all work issued on all streams of the device is done."""
        self.num_drains += 1
        self._drain()

    @abstractmethod
    def _drain(self) -> None: ...

    # -- memory -----------------------------------------------------------------------------------------------------

    counts_bytes: bool
    """Whether the allocator counts allocated bytes."""

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device copies from and to without blocking: pinned memory for a GPU."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to this device without blocking the host; work issued afterwards sees the copy.

        A copy from unpinned memory would block until all earlier work of its stream is done.
        """
        return self.host_empty(tensor.shape, tensor.dtype).copy_(tensor).to(self.device, non_blocking=True)

    @cached_property
    def arena(self) -> PinnedArena:
        """An arena of host memory that `host_empty` allocates once."""
        return PinnedArena(self.host_empty)

    def lasting_on_host(self, shape: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return memory as `host_empty` does, on a GPU from the arena, for as long as `owner` lives."""
        if self.is_asynchronous:
            return self.arena.lasting(shape, dtype, owner)
        return self.host_empty(shape, dtype)

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has reserved on the device; on a CPU, the process's resident bytes."""

    @abstractmethod
    def peak_allocated_bytes(self) -> int:
        """Return the peak bytes of live tensors since `reset_peaks`."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int:
        """Return the peak bytes reserved on the device since `reset_peaks`; on a CPU, since the process began."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Restart the counting of peaks."""

    @abstractmethod
    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return the device's free memory and its total memory, in bytes."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return cached memory that no tensor uses to the device."""

    # -- arithmetic -------------------------------------------------------------------------------------------------

    @abstractmethod
    def allow_tf32(self, is_allowed: bool) -> None:
        """Set whether the operands of fp32 matmuls and convolutions are rounded to TF32."""

    @property
    def has_bf16_matmuls(self) -> bool:
        """Whether there are hardware instructions for bf16 (and, on a GPU, TF32) matmuls."""
        return True

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a callable that repeats the device work of `call`: a captured graph where the device has graphs."""
        return call


class _HostEvent:
    """The moment at which it was recorded; all work issued before was done by then."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any = None, /) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _HostEvent, /) -> float:
        return (other._at - self._at) * 1e3


class _HostStream:
    """The host's thread, which does its work at once."""

    def wait_event(self, event: Any, /) -> None:
        pass

    def wait_stream(self, other: Any, /) -> None:
        pass

    def record_event(self, event: _HostEvent | None = None, /) -> _HostEvent:
        event = event or _HostEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass


class _HostAccelerator(Accelerator):
    """The host itself: every call returns when its work is done."""

    is_asynchronous = False
    counts_bytes = False
    _RSS_UNIT = 1 if sys.platform == "darwin" else 1024

    def make_current(self) -> None:
        pass

    def current_stream(self) -> Stream:
        return _HostStream()

    def new_stream(self) -> Stream:
        return _HostStream()

    def event(self, is_timed: bool = False) -> DeviceEvent:
        return _HostEvent()

    def _drain(self) -> None:
        pass

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def allocated_bytes(self) -> int:
        return self.reserved_bytes()

    def reserved_bytes(self) -> int:
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except OSError:
            return self.peak_reserved_bytes()

    def peak_allocated_bytes(self) -> int:
        return self.peak_reserved_bytes()

    def peak_reserved_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * self._RSS_UNIT

    def free_and_total_bytes(self) -> tuple[int, int]:
        return int(min(free_bytes(), machine_bytes())), machine_bytes()

    def reset_peaks(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def allow_tf32(self, is_allowed: bool) -> None:
        pass


class _Gpu(Accelerator):
    """A device that `torch.accelerator` drives."""

    is_asynchronous = True
    counts_bytes = True

    def make_current(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> Stream:
        return torch.Stream(self.device)

    def event(self, is_timed: bool = False) -> DeviceEvent:
        return torch.Event(self.device, enable_timing=is_timed)

    def _drain(self) -> None:
        torch.accelerator.synchronize(self.device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        is_there = tensor.device.type == self.device.type
        return tensor.to(self.device) if is_there else super().to_device(tensor)

    def allocated_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def reserved_bytes(self) -> int:
        return torch.accelerator.memory_reserved(self.device)

    def peak_allocated_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int:
        return torch.accelerator.max_memory_reserved(self.device)

    def reset_peaks(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self.device)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()


class _CudaGpu(_Gpu):
    """A GPU of NVIDIA or of AMD; torch uses the same names for both."""

    _BF16_CAPABILITY = (8, 0)

    def allow_tf32(self, is_allowed: bool) -> None:
        # These set what `fp32_precision` also sets; torch raises where the two disagree.
        torch.backends.cuda.matmul.allow_tf32 = is_allowed
        torch.backends.cudnn.allow_tf32 = is_allowed

    @property
    def has_bf16_matmuls(self) -> bool:
        is_amd = torch.version.hip is not None
        return is_amd or torch.cuda.get_device_capability(self.device) >= self._BF16_CAPABILITY

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay


_KINDS: dict[str, type[Accelerator]] = {"cpu": _HostAccelerator, "cuda": _CudaGpu}
_accelerators: dict[torch.device, Accelerator] = {}


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator of `device`; there is one per device and process."""
    key = torch.device("cpu") if device.type == "cpu" else device
    if key not in _accelerators:
        _accelerators[key] = _KINDS.get(device.type, _Gpu)(key)
    return _accelerators[key]


def install(accelerator: Accelerator) -> Accelerator:
    """Use `accelerator` for its device from now on and return the previous one."""
    before = accelerator_of(accelerator.device)
    _accelerators[accelerator.device] = accelerator
    return before


def num_devices(kind: str) -> int:
    """Return the number of devices of a kind, such as ``cuda``, that this process can use."""
    module = torch.get_device_module(kind)
    return module.device_count() if module.is_available() else 0


def device_name(device: torch.device) -> str:
    """Return the name that a GPU reports."""
    return torch.get_device_module(device).get_device_name(device)


_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator, of which it reads the first one that is set."""


def use_expandable_segments() -> str | None:
    """Have torch's allocator grow its segments on NVIDIA's GPUs, as plans predict, unless the user's settings decide.

    It reads them when a process first uses a GPU. Returns a warning where segments will not grow, or may not.
    """
    if torch.version.hip is not None:
        return None
    name = next((name for name in _SETTINGS if os.environ.get(name)), _SETTINGS[0])
    settings = os.environ.get(name, "")
    consequence = "plans predict memory with expandable segments, without which more is lost to fragmentation"
    if "expandable_segments" in settings or "backend:" in settings:
        return (
            None
            if "expandable_segments:True" in settings.replace(" ", "")
            else f"{name} is '{settings}': {consequence}"
        )
    if torch.cuda.is_initialized():
        return f"this process used a GPU before it joined the run: set {name}=expandable_segments:True: {consequence}"
    os.environ[name] = ",".join(filter(None, (settings, "expandable_segments:True")))
    return None


def total_bytes(device: torch.device) -> int:
    """Return the total memory that a GPU reports, in bytes."""
    return torch.get_device_module(device).get_device_properties(device).total_memory


def can_reach(device: torch.device, other: torch.device) -> bool:
    """Return whether a GPU can access the memory of another directly."""
    return device.type == "cuda" and torch.cuda.can_device_access_peer(device, other)


def nccl_version() -> str | None:
    """Return the version of NCCL that GPUs here would use, or None."""
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def seed_generators(number: int) -> None:
    """Seed the random generators of the host and, if this process uses a GPU, of its current GPU."""
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes a hundred times as long
    device = torch.accelerator.current_accelerator()
    if device is not None and (module := torch.get_device_module(device)).is_initialized():
        module.default_generators[module.current_device()].manual_seed(number)
