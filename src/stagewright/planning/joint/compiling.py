"""Compile the kernels of the joint search, with which a search for plans ends, in another process meanwhile.

numba compiles a kernel when it is first called, and keeps it on disk; those of the joint search take 20 s, once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from stagewright.compiled import is_compiled
from stagewright.machine import num_more_processes, python_command

_BYTES = 2**29
"""Memory of the process in bytes, estimated generously."""


@contextlib.contextmanager
def compiled_meanwhile() -> Iterator[Callable[[], None]]:
    """While this is open, let another process compile the kernels that are not compiled yet, if there is a core for it;
    yield a function that waits until it has."""
    process = None
    if not is_compiled("anneal") and sys.executable and num_more_processes(_BYTES) > 0:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.suppress(OSError):  # no more processes
            process = subprocess.Popen(
                python_command(__name__), env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def wait() -> None:
        if process is not None:
            process.wait()

    try:
        yield wait
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def compile_all() -> None:
    """Compile all kernels of the joint search by searching once for a small problem."""
    from stagewright.planning.joint.problem import JointProblem, LayerTable
    from stagewright.planning.joint.search import Effort, search

    layers, recomputing = (
        LayerTable.of([seconds] * 8, [1.0] * 8, [1.0] * 8, saved_bytes=num_bytes, boundary_bytes=1.0)
        for seconds, num_bytes in ((1.0, 8.0), (2.0, 4.0))
    )
    problem = JointProblem.of(layers, 2, 8, memory_bytes=200.0, recomputing=(recomputing,), bytes_per_s=1e3)
    search(problem, Effort(rounds=8))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    compile_all()
