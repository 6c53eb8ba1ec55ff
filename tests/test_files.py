"""Files are whole or absent, and what stands in the way of one is named, whoever writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.cli.output import check_writable
from stagewright.cluster.load import write_toml
from stagewright.cluster.matrices import _write_matrix
from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.logs import STEPS, StepLog, TrainingStep
from stagewright.execution.record import Record
from stagewright.files import cache_folder, digest_of, private_folder, write_whole
from stagewright.planning.plan import Plan

WRITERS: dict[str, Callable[[Path], None]] = {
    "anything": lambda path: write_whole(path, b"one"),
    "cluster": lambda path: write_toml(path, {"name": "ours"}, "test"),
    "matrix": lambda path: _write_matrix(path, [[0.0, 1e9], [1e9, 0.0]]),
    "plan": lambda path: Plan.model_construct().save(path),
    "record": lambda path: Record.model_construct().save(path),
}


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    write_whole(path, "one")
    write_whole(str(path), "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_failed_write_leaves_what_was_there(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"cannot write '.*file': No space left on device; make room there"):
        write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_that_cannot_be_made_is_named(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write '.*inside'"):
        write(tmp_path / "file" / "inside")


def test_a_private_folder_is_closed_to_others(tmp_path: Path) -> None:
    open_to_all = tmp_path / "new" / "mine"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    assert private_folder(open_to_all) == open_to_all
    assert open_to_all.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path / "other" / "mine").stat().st_mode & 0o777 == 0o700


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"'.*link' is a link or a file, not a folder"):
        private_folder(tmp_path / "link")


def test_somebody_elses_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder(tmp_path / "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(InputError, match=r"'.*theirs' belongs to another user"):
        private_folder(folder)


def test_a_user_without_a_home_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGEWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cache_folder("traces").is_relative_to(tmp_path)


def test_a_digest_is_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert digest_of(tmp_path / "empty").startswith("e3b0c44298fc1c14")


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_a_link_leads_to_is_not_overwritten(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("old")
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(
        InputError, match=r"cannot write '.*link': it is a symbolic link to 'precious'; name that"
    ):
        write(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "old" and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_put_in_the_place_of_a_pipe_or_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "a pipe or a device"),
        (Path("/dev/null"), "a pipe or a device"),
        (tmp_path, "a folder"),
    ):
        before = path.lstat()
        with pytest.raises(InputError, match=f"it is {reason}"):
            write_whole(path, "new")
        with pytest.raises(InputError, match=f"it is {reason}"):
            check_writable(path)
        assert path.lstat().st_ino == before.st_ino


def test_a_link_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"a symbolic link to '.*nowhere'"):
        check_writable(tmp_path / "link")


def test_a_folder_that_a_link_leads_to_is_fine(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write_whole(tmp_path / "link" / "plan.json", "one")
    assert (tmp_path / "folder" / "plan.json").read_text() == "one"


def test_who_may_read_a_file_is_left_to_its_user(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "new", "one")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "new").chmod(0o640)
    write_whole(tmp_path / "new", "two")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_text_that_no_file_can_have_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match="cannot write"):
        write_whole(tmp_path / "file", "\ud800")
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_steps_are_not_added_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("old")
    (tmp_path / STEPS).symlink_to("precious")
    log = StepLog(tmp_path, 1)
    with pytest.warns(StagewrightWarning, match=STEPS):
        log(TrainingStep(2, 2, 1.0, 1.0, 1e-3, False, 1.0, 1.0, 0.1, 1, 0.0))
    assert (tmp_path / "precious").read_text() == "old"
