"""Program files: the CSV of torch.distributed.pipelining, and Stagewright's text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.documents import read_sealed_json, read_text, sealed
from stagewright.errors import InputError

if TYPE_CHECKING:
    from stagewright.schedule import Program
    from stagewright.simulation.prediction import ProgramPrediction

_SUFFIXES = (".csv", ".txt", ".json")


def is_program_file(text: str) -> bool:
    """Return whether `text` has the suffix of a program file.

    >>> is_program_file("torch.csv"), is_program_file("1f1b")
    (True, False)
    """
    return Path(text).suffix in _SUFFIXES


def read_predicted_program(path: Path) -> tuple[Program, ProgramPrediction | None]:
    """Return the program in a file and its prediction; None unless the file states costs, which only JSON can.

    Raises:
        InputError: the file cannot be read or is not a program, or its prediction makes no sense.
        ScheduleError: an action or the placement is wrong.
    """
    from stagewright.schedule import Program
    from stagewright.schedule.torch_csv import read_torch_csv

    if path.suffix == ".csv":
        return read_torch_csv(read_text(path, "program"), path.stem), None
    if path.suffix == ".txt":
        return Program.from_text(read_text(path, "program")), None
    from stagewright.simulation.prediction import ProgramPrediction

    document = read_sealed_json(path, "program")
    program = Program.from_document(document)
    return program, ProgramPrediction.of_document(document, program, f"program '{path}'")


def check_suffix(path: Path | None) -> None:
    """Raise `InputError` for an output whose suffix is not that of a program file."""
    if path is not None and path.suffix not in _SUFFIXES:
        raise InputError(
            f"cannot write '{path}': end its name in .json for the program with cuts, costs and predictions, or for the "
            "order of actions only in .txt, or in .csv for torch.distributed.pipelining"
        )


def program_text(path: Path, program: Program, prediction: ProgramPrediction) -> str:
    """Return the text to write to `path`, whose suffix `check_suffix` has checked; see `lost_in`. Raises `ScheduleError` if
    the format cannot represent an action of the program."""
    if path.suffix == ".txt":
        return program.to_text()
    if path.suffix == ".csv":
        from stagewright.schedule import write_torch_csv

        return write_torch_csv(program)
    return sealed(json.dumps(program.to_document() | prediction.model_dump(mode="json"))) + "\n"


def lost_in(path: Path) -> str | None:
    """Return a sentence on what a program file of this suffix cannot hold; None if nothing is lost."""
    if path.suffix == ".json":
        return None
    return f"{path} has only the order of actions: cuts, costs and predictions need a file that ends in .json"
