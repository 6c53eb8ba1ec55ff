"""Freed tensors leave their memory to the next ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CODE = """
import resource, sys
import torch
from stagewright.execution.allocation import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 * 2**20)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(24):  # the heap settles after some
    faults = touch()
print(faults)
"""


def _faults(how: str, **environment: str) -> int:
    """Page faults of a large tensor where some of its size were freed before."""
    command = [sys.executable, "-c", _CODE, how]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of the GNU C library")
def test_memory_of_freed_tensors_is_used_again() -> None:
    assert _faults("keep") < 100 < _faults("leave")


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.execution.allocation import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
