"""Time limits of the tests: as they are said where nothing else runs, longer where much does, and never without end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import patience
from patience import MOST, Deadline, patient


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, and how slow the machine is."""
    values = [100.0, 1.0]
    monkeypatch.setattr(time, "monotonic", lambda: values[0])
    monkeypatch.setattr(patience, "slowness", lambda: values[1])
    return values


def test_a_limit_is_what_it_says_on_a_machine_with_nothing_else_to_do(pace: list[float]) -> None:
    deadline = Deadline(10)
    assert deadline.left() == patient(10) == 10
    pace[0] += 9
    assert deadline
    pace[0] += 1
    assert not deadline and deadline.left() == 0


def test_a_limit_grows_with_what_else_the_machine_does_then(pace: list[float]) -> None:
    deadline = Deadline(10)
    pace[0] += 11
    pace[1] = 3.0  # since somebody has come meanwhile
    assert deadline.left() == 19
    pace[0] += 19
    pace[1] = 1.0
    assert not deadline


def test_slowness_is_measured_and_bounded() -> None:
    patience._measured.clear()
    assert 1 <= patience.slowness() <= MOST


TEST = """
import time
import patience

def test_that_takes_longer_than_it_may():
    patience.slowness = lambda: {slowness}
    time.sleep({seconds})
"""


@pytest.mark.parametrize(("slowness", "seconds", "code"), [(60.0, 1.2, 0), (1.0, 60.0, 1)])
def test_the_limit_of_a_test_grows_too(slowness: float, seconds: float, code: int, tmp_path: Path) -> None:
    """It is of half a second; the machine is said to be slow when that is over."""
    (tmp_path / "conftest.py").write_text("from tests_conftest import pytest_timeout_set_timer\n")
    (tmp_path / "tests_conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TEST.format(slowness=slowness, seconds=seconds))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "0.5", str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": f"{Path(__file__).parent}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("Timeout" in done.stdout) == bool(code)
