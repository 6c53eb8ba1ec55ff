"""Under torchrun a run that lost a rank goes on by itself, and one that lost a host on what is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import IO

import pytest
from plans import make_plan

from patience import Deadline, patient
from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


class Host:
    """A launcher with its ranks, as one host of a run has it."""

    def __init__(self, folder: Path, number: int, ranks: int, *words: str) -> None:
        self.log = folder / f"host-{number}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *words]
        self._file: IO[bytes] = self.log.open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self._file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[int]:
        """Their process numbers."""
        asked = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
        listed = subprocess.run(asked, capture_output=True, text=True, check=False)
        return [int(word) for word in listed.stdout.split()]

    def wait_for(self, pattern: str) -> None:
        deadline = Deadline(120)
        while not re.search(pattern, self.said):
            assert self.process.poll() is None and deadline, self.said
            time.sleep(0.05)

    def kill(self) -> None:
        """All at once, as when the machine is gone."""
        for pid in (self.process.pid, *self.ranks()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.kill()


def run_words(folder: Path, *more: str) -> list[str]:
    kept = ("--checkpoint", "kept", "--checkpoint-every", "1", "--keep-last", "2", "--timeout", "60")
    return ["-m", "stagewright.cli", "run", "plan.json", "--device", "cpu", "--out", "out", *kept, *more]


def test_after_a_killed_rank_the_run_goes_on(tmp_path: Path, hosts: list[Host]) -> None:
    make_plan(tmp_path / "plan.json")
    words = ("--standalone", "--max-restarts", "2", *run_words(tmp_path, "--steps", "12"))
    hosts.append(host := Host(tmp_path, 0, 2, *words))
    host.wait_for(r"step 4/12")
    os.kill(host.ranks()[-1], signal.SIGKILL)
    assert host.process.wait(patient(150)) == 0, host.said
    steps = [int(number) for number in re.findall(r"step (\d+)/12", host.said)]
    again = [after for before, after in pairwise(steps) if after <= before]
    # It begins anew once, after the newest whole checkpoint: a step writes its own while the next one runs, after the last.
    assert steps[-1] == 12 and steps.count(1) == 1, steps
    assert len(again) <= 1 and all(number > 2 for number in again), steps
    assert "SIGKILL" in host.said or "died" in host.said


def replanning(folder: Path, is_script: bool) -> list[str]:
    """What each rank runs: the verb, or a script of one's own."""
    if not is_script:
        return run_words(folder, "--steps", "100000", "--replan")
    script = """
        import stagewright

        kept = dict(checkpoint="kept", checkpoint_every=1, keep_last=2)
        options = dict(steps=100000, out="out", device="cpu", timeout=60, replan=True)
        stagewright.Trainer("plan.json", **kept, **options).fit()
    """
    (folder / "train.py").write_text(dedent(script))
    return ["train.py"]


@pytest.mark.parametrize("is_script", [pytest.param(False, id="verb"), pytest.param(True, id="script")])
def test_after_a_lost_host_the_run_is_planned_again_for_the_rest(
    tmp_path: Path, hosts: list[Host], is_script: bool
) -> None:
    job = Job(global_batch=4, sequence_length=16, dtype="fp32")
    estimate("tiny-llama", load_cluster("2x-rtx3090"), job, pp=2).save(tmp_path / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for number in range(2):
        words = (
            "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "run",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={1 - number},last_call_timeout=5",
            *replanning(tmp_path, is_script),
        )  # fmt: skip
        hosts.append(Host(tmp_path, number, 1, *words))
    first, second = hosts
    first.wait_for(r"step \d\d/")  # of so many steps not every one is told
    second.kill()
    first.wait_for(r"1 of 2 ranks remain: planned again")
    planned = first.said.index("planned again")
    deadline = Deadline(120)
    while not (found := re.findall(r"step (\d+)/", first.said[planned:])):
        assert first.process.poll() is None and deadline, first.said
        time.sleep(0.1)
    assert int(found[0]) > 5, first.said  # from a checkpoint near the tenth step, and not anew
