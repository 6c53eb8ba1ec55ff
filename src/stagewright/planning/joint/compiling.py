"""Compilation of the joint search's kernels by another process, once on a machine, while a model is traced."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from stagewright.compiled import kernel_folder
from stagewright.machine import num_cores, python_command
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search

_DONE = "joint-search-compiled"
"""Name of the file in the folder of compiled code that says that nothing is left to do."""


@contextlib.contextmanager
def compiling() -> Iterator[subprocess.Popen[bytes] | None]:
    """Compile the kernels in another process while this is open; None where that is done, or this process has one core."""
    folder = kernel_folder()
    if folder is None or (folder / _DONE).exists() or num_cores() == 1 or not sys.executable:
        yield None
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            python_command(__name__), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:  # the kernels are compiled when they are called
        yield None
        return
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _compile() -> None:
    """Search a small problem whose bound is out of reach, with and without recomputation, so that every kernel is called."""
    seconds = np.linspace(1.0, 2.0, 8)
    layers = LayerTable.of(seconds, seconds, seconds, saved_bytes=8.0)
    recomputing = LayerTable.of(seconds, 2.5 * seconds, 0.0 * seconds, saved_bytes=4.0, held_bytes=0.0)
    for tables in ((), (recomputing,)):
        problem = JointProblem.of(layers, 3, 8, memory_bytes=200.0, latency_s=1.0, recomputing=tables)
        search(problem, Effort(rounds=8))
    folder = kernel_folder()
    if folder is not None:
        (folder / _DONE).touch()


if __name__ == "__main__":
    _compile()
