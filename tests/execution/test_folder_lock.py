"""A folder is one run's at a time, and free when that has ended, however it did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plans import make_plan
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.errors import InputError
from stagewright.execution.folder_lock import LOCK, in_use

HOLD = """
import sys, time
from stagewright.execution.folder_lock import in_use
with in_use(sys.argv[1], "--out"):
    print("held", flush=True)
    time.sleep(600)
"""


def held(folder: Path) -> subprocess.Popen[str]:
    """A process that has `folder`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_folder_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json", overrides={"num_hidden_layers": 2}, pp=1)
    busy, other = tmp_path / "busy", tmp_path / "other"
    process = held(busy)
    try:
        options = {"--out": ["--checkpoint", str(other)], "--checkpoint": ["--out", str(other)]}
        for option, rest in options.items():
            command = ["run", str(tmp_path / "plan.json"), "--device", "cpu", option, str(busy), *rest]
            done = CliRunner().invoke(app, command)
            said = " ".join(done.stderr.split())
            assert done.exit_code == 2
            assert f"'{busy}' is in use by process {process.pid} on host " in said and " since 20" in said
            assert f"give another folder with {option}" in said
        with in_use(other, "--out"):  # which the refused runs have given back
            pass
    finally:
        process.kill()
        process.wait()
    with in_use(busy, "--out"):
        assert (busy / LOCK).exists()
    assert not (busy / LOCK).exists()


def test_one_folder_may_be_for_records_and_checkpoints(tmp_path: Path) -> None:
    with in_use(tmp_path / "one", "--out"), in_use(tmp_path / "one" / "", "--checkpoint"):
        pass
    with in_use(tmp_path / "one", "--out"):
        pass


def test_ranks_of_a_launcher_leave_it_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = held(tmp_path)
    try:
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InputError, match="is in use by process"), in_use(tmp_path, "--out"):
            pass
        monkeypatch.setenv("RANK", "1")
        with in_use(tmp_path, "--out"):
            pass
    finally:
        process.kill()
        process.wait()
