"""Faults, files and interruptions at the edge of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patience import patient
from stagewright import cli
from stagewright.cli.output import check_writable
from stagewright.errors import InputError


def test_a_file_that_could_not_be_written_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        check_writable(tmp_path / "absent" / "plan.json")
    with pytest.raises(InputError, match="it is a folder"):
        check_writable(tmp_path)
    check_writable(tmp_path / "plan.json")


def test_a_fault_of_ours_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("stagewright.cli.app.app", broken)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    shown = capsys.readouterr().err
    assert "KeyError: 'oops'" in shown and "--traceback" in shown and "Traceback" not in shown


def test_a_signal_that_torch_turned_into_an_error_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SignalError(Exception):
        sigval = signal.SIGINT

    def interrupted(*_: object, **__: object) -> None:
        raise SignalError("Process 1 got signal: 2")

    monkeypatch.setattr("stagewright.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_quiet() -> None:
    code = (
        "import signal, sys, time; import stagewright.cli.app as a, stagewright.cli as c\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts deaf to it
        "def slow(**_): print('ready', flush=True); time.sleep(60)\n"
        "a.app.command('slow')(lambda: slow())\n"
        "sys.argv = ['stagewright', 'slow']; c.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=patient(20))
    assert process.returncode == 130
    assert shown.strip() == ""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m stagewright.cli schedule 1f1b -p 16 -m 512 --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["{"]


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "1f1b", "-p", "16", "-m", "512", "--json"],  # more than a pipe holds
        ["schedule", "1f1b", "-p", "16", "-m", "64"],
        ["schedule", "1f1b", "--json"],  # less than the buffer of stdout
        ["--help"],
    ],
    ids=["document", "table", "short", "help"],
)
def test_a_reader_that_leaves_early_is_no_failed_run(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stagewright.cli", *words]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(
    ("words", "code"), [(["trace", "tiny-llama", "--json"], 0), (["trace", "tiny-llama", "--ep", "2"], 2)]
)
def test_a_verb_that_used_torch_ends_at_once_and_says_all(words: list[str], code: int) -> None:
    command = [sys.executable, "-m", "stagewright.cli", *words, "--sequence-length", "64", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == code
    if code:
        assert "leave out --ep" in done.stderr and not done.stdout
    else:
        assert json.loads(done.stdout)["num_nodes"] > 100
