"""Users without a home, or without a name, as in containers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ASK = """
import getpass, os, pwd, sys
from pathlib import Path
from stagewright import compiled
from stagewright.cli import find_home
user = int(sys.argv[1])
os.setgid(user)
os.setuid(user)
find_home()
print(Path.home(), getpass.getuser(), compiled._folder(), sep="|")
"""


def open_to_others(folder: Path) -> None:
    """And the folders of the tests above it."""
    while folder.name != Path(tempfile.gettempdir()).name and folder.stat().st_uid == os.geteuid():
        folder.chmod(0o755)
        folder = folder.parent


def found_by(user: int, temporary: Path, **environment: str) -> list[str]:
    """Home, name and the folder of compiled kernels as a user who is a bare number finds them."""
    temporary.mkdir()
    temporary.chmod(0o1777)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(user)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary), **environment},
        capture_output=True, text=True, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("home", [None, "/nonexistent"])
def test_who_has_no_home_gets_one(home: str | None, tmp_path: Path) -> None:
    open_to_others(tmp_path)
    environment = {} if home is None else {"HOME": home}
    found, name, _ = found_by(54321, tmp_path / "temporary", **environment)
    assert found == str(tmp_path / "temporary" / "stagewright-54321") and name == "user-54321"
    assert Path(found).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be somebody else")
def test_a_home_that_cannot_be_written_keeps_what_it_holds(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    (tmp_path / "home").mkdir(mode=0o755)
    found, _, compiled = found_by(54321, tmp_path / "temporary", HOME=str(tmp_path / "home"))
    assert found == str(tmp_path / "home")
    assert Path(compiled).parent == tmp_path / "temporary" / "stagewright-54321" / "stagewright" / "kernels"


def test_a_home_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagewright.cli import find_home

    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)
    find_home()
    assert dict(os.environ) == before
