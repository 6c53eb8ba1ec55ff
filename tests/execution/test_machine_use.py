"""Other programs on the cores of a measurement are noticed; the measurement's own processes are not taken for others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from patience import patient
from stagewright.execution.machine_use import MachineUse, cores_of_others

QUIET = MachineUse(clock_s=100.0, cores_s=1000.0, own_s=50.0, num_cores=4)


def later(seconds: float, own: float, others: float) -> MachineUse:
    return replace(
        QUIET,
        clock_s=QUIET.clock_s + seconds,
        cores_s=QUIET.cores_s + own + others,
        own_s=QUIET.own_s + own,
    )


def test_own_work_is_no_other() -> None:
    assert cores_of_others(QUIET, later(10, own=38, others=3.9)) is None


def test_others_are_told() -> None:
    assert cores_of_others(QUIET, later(10, own=20, others=15)) == 1.5


def test_nothing_is_said_where_the_system_does_not_tell() -> None:
    assert cores_of_others(None, None) is cores_of_others(QUIET, None) is None


@pytest.mark.skipif(MachineUse.now() is None, reason="this system does not tell who uses its cores")
def test_seconds_of_children_are_own_once_they_have_ended() -> None:
    before = MachineUse.now()
    busy = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", busy], check=True, timeout=patient(60))
    after = MachineUse.now()
    assert before is not None and after is not None
    assert after.num_cores == len(os.sched_getaffinity(0))
    assert after.own_s - before.own_s >= 0.5
    assert after.cores_s - before.cores_s >= 0.4  # ticks of a hundredth
    assert 0 < after.clock_s - before.clock_s <= time.monotonic() - before.clock_s
