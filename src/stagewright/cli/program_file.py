"""Programs from files: of torch.distributed.pipelining (CSV), and our own text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.documents import read_sealed_json, read_text, sealed
from stagewright.errors import InputError

if TYPE_CHECKING:
    from stagewright.schedule import Program
    from stagewright.simulation.prediction import ProgramPrediction

_ENDINGS = (".csv", ".txt", ".json")


def is_program_file(text: str) -> bool:
    """Whether `text` has the ending of a program file.

    >>> is_program_file("torch.csv"), is_program_file("1f1b")
    (True, False)
    """
    return Path(text).suffix in _ENDINGS


def read_promised_program(path: Path) -> tuple[Program, ProgramPrediction | None]:
    """The program in a file, and what its document promises; None where it states no costs, as only JSON can.

    Raises:
        InputError: the file cannot be read or is not a program, or a promise that makes no sense.
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


def check_ending(path: Path | None) -> None:
    """Raises `InputError` for the name of a program file whose ending says nothing of what is to be in it."""
    if path is not None and path.suffix not in _ENDINGS:
        raise InputError(
            f"cannot write '{path}': end its name in .json for the program with its cuts, costs and promises, or for the "
            "order of its actions alone in .txt, or in .csv as torch.distributed.pipelining reads it"
        )


def program_text(path: Path, program: Program, promise: ProgramPrediction) -> str:
    """What is written to `path`, whose ending `check_ending` has seen; see `lost_in`. Raises `ScheduleError` where the
    format does not have some action of the program."""
    if path.suffix == ".txt":
        return program.to_text()
    if path.suffix == ".csv":
        from stagewright.schedule import write_torch_csv

        return write_torch_csv(program)
    return sealed(json.dumps(program.to_document() | promise.model_dump(mode="json"))) + "\n"


def lost_in(path: Path) -> str | None:
    """What a program file of this ending has no place for, in words."""
    if path.suffix == ".json":
        return None
    return f"{path} has the order of actions alone: cuts, costs and what is promised need a file that ends in .json"
