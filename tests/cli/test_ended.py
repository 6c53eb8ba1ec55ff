"""What a run says that is ended before it trains, from where its plan is read, and what a failure leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stagewright
from patience import patient
from stagewright.errors import InputError
from stagewright.execution.folder_lock import in_use
from stagewright.planning.plan import ModelSection
from stagewright.tracing.models.reference import resolve

NET = """
from torch import nn
def build(): return nn.Linear(4, 4), {}
"""


def section(text: str) -> ModelSection:
    return ModelSection.of(resolve(text))


def test_a_factory_s_file_is_found_from_the_folder_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    planned = section("net.py:build")
    assert planned.found_from(tmp_path) == planned
    monkeypatch.chdir(tmp_path / "inner")
    found = planned.found_from(Path(".."))
    assert found.text == "../net.py:build" and found.resolved().digest == planned.digest
    with pytest.raises(InputError, match="or, in a plan, to the plan's folder"):
        planned.found_from(Path()).resolved()


def test_a_folder_in_which_nothing_was_written_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(InputError), in_use(tmp_path / "a" / "b", "--checkpoint"):
        raise InputError("nothing to read")
    assert not list(tmp_path.iterdir())
    with in_use(tmp_path / "a" / "b", "--checkpoint"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"global_batch": 0, "sequence_length": 8}, "global_batch = 0: must be greater than or equal to 1"),
        ({"sequence_length": 8}, "global_batch is missing: add it"),
        ({"global_batch": 8, "sequence_length": 8, "dtyp": "bf16"}, "did you mean 'dtype'"),
    ],
)
def test_a_job_refuses_in_our_words(values: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        stagewright.Job(**values)


WAITS = """
import signal, sys, time
from stagewright.cli.run import _message_on_sigterm, _newest_checkpoint_on_exit
from pathlib import Path
with _message_on_sigterm(), _newest_checkpoint_on_exit(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(100)
"""


def test_a_run_that_is_ended_while_it_starts_says_so(tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=patient(20))[1]
    assert process.returncode == 143
    assert "ended by SIGTERM before any rank was started: nothing was trained" in said
    assert "step-000003': the same command with --resume continues from there" in said


LEAVES = """
import os, signal
from stagewright.cli.run import _message_on_sigterm
from stagewright.errors import RunError

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

try:
    with _message_on_sigterm():
        raise RunError("rank 1 died")
except RunError as error:
    late = Late()
    del late
    print(error)
"""


def test_a_run_that_is_ended_while_it_leaves_with_an_error_says_that_alone() -> None:
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(20), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 1 died\n", "")


EXITS = """
import atexit, os, signal, sys
from stagewright.cli import main
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
sys.argv = ["stagewright", "--version"]
main()
"""


def test_a_command_that_is_ended_while_it_exits_says_nothing() -> None:
    command = [sys.executable, "-c", EXITS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(20), check=False)
    assert done.returncode == -signal.SIGTERM and done.stderr == ""
