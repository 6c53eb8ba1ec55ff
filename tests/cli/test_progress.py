"""Progress: how much is done and how long it still takes, on one line, of terminals alone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from stagewright.cli import progress
from stagewright.cli.progress import Progress


def test_a_count_tells_how_much_is_done_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = Progress("planning")
    assert told._line().plain == "planning"
    told("10 of 40: dp 2 x pp 4")
    assert told._line().plain == "10 of 40: dp 2 x pp 4 25%"
    now[0] += 5.0
    told("20 of 40: dp 1 x pp 8")
    assert told._line().plain == "20 of 40: dp 1 x pp 8 50%, about 10 s left"
    told("1 of 4 graphs")
    assert told._line().plain == "1 of 4 graphs 25%", "another stretch of work begins anew"
    told("recomputing and offloading more")
    assert told._line().plain == "recomputing and offloading more"


def test_the_line_keeps_to_its_width_and_its_figures() -> None:
    told = Progress("")
    told("3 of 4: " + "a long name " * 20)
    assert len(told._line().plain) <= 80 - 3 and told._line().plain.endswith("… 75%")


WORKS = """
import time
from stagewright.cli import progress
progress.DELAY_SECONDS = 0.1
with progress.Progress("working") as told:
    for number in range(8):
        told(f"{number} of 8 steps")
        time.sleep(0.1)
print("done")
"""


def test_nothing_is_told_but_at_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", WORKS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_terminal_has_one_line_which_is_gone_in_the_end() -> None:
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", WORKS], stdout=subprocess.PIPE, stderr=follower, text=True, check=True,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    said = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.stdout == "done\n" and "of 8 steps" in said
    assert said.count("\n") <= 1, "the line is drawn over itself"
