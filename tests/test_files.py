"""Files are whole or absent, and what stands in the way of one is named, whoever writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.cluster.toml import write_toml
from stagewright.errors import InputError
from stagewright.execution.record import Record
from stagewright.files import write_whole
from stagewright.planning.plan import Plan

WRITERS: dict[str, Callable[[Path], None]] = {
    "anything": lambda path: write_whole(path, b"one"),
    "cluster": lambda path: write_toml(path, {"name": "ours"}, "test"),
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
