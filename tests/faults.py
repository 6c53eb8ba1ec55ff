"""A run as a user starts it, to be killed, halted and interrupted, and a disk that is soon full; nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from patience import Deadline

GET_GOING_S = 120.0
"""What a run is given to come to its first step."""


class StartedRun:
    """``stagewright run`` in a session of its own; `words` are its options."""

    def __init__(self, log: Path, *words: str, **environment: str) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stagewright.cli", "run", *words],
                stdout=out, stderr=out, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition: Callable[[], object], seconds: float = GET_GOING_S) -> None:
        deadline = Deadline(seconds)
        while not condition():
            assert self.process.poll() is None, f"the run ended early:\n{self.said}"
            assert deadline, f"the run did not get there:\n{self.said}"
            time.sleep(0.02)

    def wait_for_words(self, words: str) -> None:
        self.wait_for(lambda: words in self.said)

    def wait_for_step(self, step: int) -> None:
        """Until it has said of a step, this one or a later one, that it is done."""
        self.wait_for(
            lambda: any(int(found) >= step for found in re.findall(r"^step (\d+)/", self.said, re.M))
        )

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that are there by now."""
        return {
            int(environment[b"RANK"]): pid
            for pid, parent, environment in _processes()
            if parent == self.process.pid and b"RANK" in environment
        }

    def rank(self, number: int) -> int:
        self.wait_for(lambda: number in self.ranks())
        return self.ranks()[number]

    def environment_of(self, pid: int) -> dict[str, str]:
        found = next(environment for other, _, environment in _processes() if other == pid)
        return {name.decode(): value.decode() for name, value in found.items()}

    def end(self, seconds: float) -> tuple[int, float]:
        """Exit code, and the seconds until it came."""
        deadline = Deadline(seconds)
        while (left := deadline.left()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(left), time.monotonic() - deadline.began
        raise AssertionError(
            f"the run still goes on after {time.monotonic() - deadline.began:.0f} s:\n{self.said}"
        )

    def left_over(self) -> list[int]:
        """Processes of its session that still run."""
        return processes_of(str(self.log))


def processes_of(run: str) -> list[int]:
    """Return the processes that run with ``FAULTS_RUN=run``, ranks that outlive their launcher for a moment included."""
    return [pid for pid, _, environment in _processes() if environment.get(b"FAULTS_RUN") == run.encode()]


@contextmanager
def started_run(log: Path, *words: str, **environment: str) -> Iterator[StartedRun]:
    """Ends it, and all it started, on the way out."""
    run = StartedRun(log, *words, FAULTS_RUN=str(log), **environment)
    try:
        yield run
    finally:
        for pid in [run.process.pid, *run.left_over()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of about so many bytes at `folder`, gone on the way out; skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes // 1024}k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def listening_addresses(pids: set[int]) -> set[str]:
    """Where processes listen for TCP connections, as the kernel writes addresses (hexadecimal, its own byte order)."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                    found.add(columns[1].rpartition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def is_running(pid: int) -> bool:
    """Whether a process has not ended, whether or not anybody has taken note."""
    with suppress(OSError):
        return _parent_and_state(Path(f"/proc/{pid}"))[1] != "Z"
    return False


def _processes() -> Iterator[tuple[int, int, dict[bytes, bytes]]]:
    """Id, parent and environment of every process that tells."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError):
            parent, state = _parent_and_state(entry)
            lines = (entry / "environ").read_bytes().split(b"\0")
            if state != "Z":
                yield int(entry.name), parent, dict(line.split(b"=", 1) for line in lines if b"=" in line)


def _parent_and_state(entry: Path) -> tuple[int, str]:
    columns = (entry / "stat").read_text().rpartition(")")[2].split()
    return int(columns[1]), columns[0]
