"""Programs from files: of torch.distributed.pipelining (CSV), and our own text and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.documents import read_json, read_text

if TYPE_CHECKING:
    from stagewright.schedule import Program


def is_program_file(text: str) -> bool:
    """Whether `text` has the ending of a program file.

    >>> is_program_file("torch.csv"), is_program_file("1f1b")
    (True, False)
    """
    return Path(text).suffix in _READERS


def read_program(path: Path) -> Program:
    """The program in a file.

    Raises:
        InputError: the file cannot be read or is not a program.
        ScheduleError: an action or the placement is wrong.
    """
    return _READERS[path.suffix](path)


def _from_csv(path: Path) -> Program:
    from stagewright.schedule.torch_csv import read_torch_csv

    return read_torch_csv(read_text(path, "program"), path.stem)


def _from_text(path: Path) -> Program:
    from stagewright.schedule import Program

    return Program.from_text(read_text(path, "program"))


def _from_json(path: Path) -> Program:
    from stagewright.schedule import Program

    return Program.from_document(read_json(path, "program"))


_READERS = {".csv": _from_csv, ".txt": _from_text, ".json": _from_json}
"""Program files by ending: of torch.distributed.pipelining, and our own text and JSON."""
