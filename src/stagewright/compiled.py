"""Compiled kernels: numba's decorators, with machine code cached on disk for exactly these sources.

numba keeps the code of a function while the file of that function is unchanged, although it includes the code of other
kernels that it calls, and fails if a class among its arguments has moved. So code is cached by a digest of all kernels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numba

from stagewright.errors import InputError
from stagewright.files import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])

PACKAGE = Path(__file__).parent
SOURCES = (
    "estimation/allocator.py",
    "estimation/liveness.py",
    "planning/assignment/kernels.py",
    "planning/joint/anneal.py",
    "planning/joint/layout.py",
    "planning/joint/load_balancing.py",
    "planning/joint/moves.py",
    "planning/joint/packing.py",
    "planning/partition/solver.py",
    "planning/checkpointing/pieces.py",
    "planning/checkpointing/rank_chain.py",
    "planning/checkpointing/rerun_kernels.py",
    "schedule/automatic/orders.py",
    "schedule/list_scheduler/arrivals.py",
    "schedule/list_scheduler/choosing.py",
    "schedule/list_scheduler/kernels.py",
    "schedule/list_scheduler/order_times.py",
    "schedule/list_scheduler/priorities.py",
    "simulation/engine.py",
    "simulation/memory.py",
)
"""Files with kernels."""

_MOST_KEPT = 4
"""Maximum number of folders of compiled code; older ones are removed."""


def compiled(function: Function) -> Function:
    """Compile a function on its first call; it runs without the interpreter's lock."""
    decorator: Callable[[Function], Any] = numba.njit(cache=True, nogil=True)
    return _kept(decorator, function)


def compiled_helper(function: Function) -> Function:
    """Compile a function that allocates nothing, mostly to be called by kernels; it runs without the interpreter's lock.

    Counting references to its array arguments would take several times as long as the work itself.
    """
    decorator = numba.njit(cache=True, nogil=True, _nrt=False)  # pyright: ignore[reportCallIssue]: no public option
    return _kept(decorator, function)


def is_compiled(name: str) -> bool:
    """Return whether the machine code of a kernel is on disk; True also where there is no folder for it."""
    folder = _folder()
    return folder is None or any(folder.rglob(f"*.{name}-*.nbi"))


def is_in_kernel(frame: FrameType | None) -> bool:
    """Whether `frame` runs on behalf of numba, which compiles or loads a kernel there or converts what one has returned."""
    return any(module_of(caller).startswith(("numba.", "namedtuple_")) for caller in with_callers(frame))


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame` and the frames that wait for it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__"))


def _kept(decorator: Callable[[Function], Any], function: Function) -> Function:
    folder, default_folder = _folder(), numba.config.CACHE_DIR  # type: ignore[attr-defined]
    if folder is None:
        return decorator(function)
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        return decorator(function)
    finally:
        numba.config.CACHE_DIR = default_folder  # type: ignore[attr-defined]


@cache
def _folder() -> Path | None:
    """Return the folder for the machine code of these sources; None, for numba's default, if it cannot be created."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in SOURCES:
        digest.update((PACKAGE / source).read_bytes())
    try:
        parent = PACKAGE / "__pycache__"
        if not os.access(parent if parent.exists() else PACKAGE, os.W_OK):
            parent = cache_folder("kernels")
        folder = parent / f"kernels-{digest.hexdigest()[:16]}"
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)  # another process may be as fast
            kept = sorted(parent.glob("kernels-*"), key=lambda path: path.stat().st_mtime)
            for old in kept[:-_MOST_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, InputError):
        return None
    return folder
