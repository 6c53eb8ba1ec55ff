"""`stagewright schedule`: the timetable of a schedule under given costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from stagewright.cli.options import Json, parse_settings
from stagewright.cli.output import print_document, show
from stagewright.errors import InputError, ScheduleError

if TYPE_CHECKING:
    from stagewright.schedule import Program


class PassTimes(NamedTuple):
    """Seconds of every stage's passes, and of every transfer between stages."""

    forward: float
    input_grad: float
    weight_grad: float
    transfer: float


_Seconds = Annotated[float, typer.Option(min=0.0, metavar="SECONDS")]


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="gpipe, 1f1b, interleaved-1f1b, breadth-first, zb-h1, ... or a program file."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches per batch.")] = 8,
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", help="Stages per rank; default the schedule's own.")
    ] = None,
    forward: _Seconds = 1.0,
    input_grad: _Seconds = 1.0,
    weight_grad: _Seconds = 1.0,
    transfer: _Seconds = 0.0,
    memory_limit: Annotated[
        int | None, typer.Option(min=1, help="Most activations (stage and microbatch) a rank may hold.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the schedule.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a schedule and print its timetable.

    The program is checked first: complete, in order, free of deadlock.
    """
    from stagewright.report.timelines import heading, peak_activations, rank_table, timeline_document
    from stagewright.schedule import verify
    from stagewright.simulation import StageCosts, simulate

    given = parse_settings(options)
    if memory_limit is not None and _limits_itself(name):
        given["memory_limit"] = float(memory_limit)
    seconds = PassTimes(forward, input_grad, weight_grad, transfer)
    program = verify(_program(name, ranks, microbatches, chunks, seconds, given))
    costs = StageCosts.uniform(program.num_stages, forward, input_grad, weight_grad)
    timeline = simulate(program, costs, transfer)
    if memory_limit is not None and "memory_limit" not in given:
        _check_limit(program, peak_activations(program), memory_limit)
    document = timeline_document(program, timeline)
    if as_json:
        print_document(document)
        return
    from stagewright.report.console import stdout
    from stagewright.report.timetable import picture

    console = stdout()
    show(heading(document), "", *picture(timeline, console.width, console.is_terminal), rank_table(document))


def _program(
    name: str, ranks: int, microbatches: int, chunks: int | None, seconds: PassTimes, options: dict[str, Any]
) -> Program:
    from stagewright.schedule import FAMILIES, build

    path = Path(name)
    if path.suffix in _READERS:
        return _read(path)
    accepted = inspect.signature(FAMILIES[name.lower()]).parameters if name.lower() in FAMILIES else {}
    if {"times", "seconds"} & set(accepted):
        # One microbatch is enough to learn how many stages the schedule places.
        num_stages = build(name, ranks, 1, chunks).num_stages
        options = {**_given_times(accepted, num_stages, seconds), **options}
    return build(name, ranks, microbatches, chunks, **options)


def _given_times(accepted: Iterable[str], num_stages: int, seconds: PassTimes) -> dict[str, Any]:
    """The times, as the schedules that are made for given times take them."""
    if "times" in accepted:
        from stagewright.schedule.automatic import StageTimes

        return {"times": StageTimes.uniform(num_stages, *seconds)}
    from stagewright.schedule.families.greedy import PassSeconds

    forward, input_grad, weight_grad = ([time] * num_stages for time in seconds[:3])
    return {"seconds": PassSeconds(forward, input_grad, weight_grad, seconds.transfer)}


def _limits_itself(name: str) -> bool:
    """Whether the schedule takes the memory limit as an option of its own (in its own unit)."""
    from stagewright.schedule import FAMILIES

    builder = FAMILIES.get(name.lower())
    return builder is not None and "memory_limit" in inspect.signature(builder).parameters


def _read(path: Path) -> Program:
    try:
        return _READERS[path.suffix](path)
    except OSError as error:
        raise InputError(f"program '{path}' cannot be read ({error.strerror}): check the path") from None
    except ValueError as error:
        raise InputError(f"{path} is not a program: {error}") from None


def _from_csv(path: Path) -> Program:
    from stagewright.schedule.torch_csv import read_torch_csv

    return read_torch_csv(path.read_text(encoding="utf-8"), path.stem)


def _from_text(path: Path) -> Program:
    from stagewright.schedule import Program

    return Program.from_text(path.read_text(encoding="utf-8"))


def _from_json(path: Path) -> Program:
    from stagewright.schedule import Program

    return Program.from_json(path.read_text(encoding="utf-8"))


_READERS = {".csv": _from_csv, ".txt": _from_text, ".json": _from_json}
"""Program files by ending: of torch.distributed.pipelining, and our own text and JSON."""


def _check_limit(program: Program, activations: list[int], limit: int) -> None:
    rank = max(range(len(activations)), key=activations.__getitem__)
    if activations[rank] > limit:
        raise ScheduleError(
            f"{program.name} holds {activations[rank]} activations on rank {rank}, the limit is {limit}: "
            "allow more, use fewer microbatches, or a schedule that holds fewer (1f1b: at most one per rank)"
        )
