"""`stagewright schedule`: the timetable of a schedule under given costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.groups import grouped
from stagewright.cli.options import Json, parse_settings
from stagewright.cli.output import print_document, show, timetable
from stagewright.cli.pictures import Pictures
from stagewright.cli.program_costs import CostsOf, GivenCosts, costing_of
from stagewright.cli.program_file import is_program_file, read_predicted_program
from stagewright.cli.refuse import is_given, refuse
from stagewright.documents import is_plan_file
from stagewright.errors import InputError, ScheduleError
from stagewright.limits import MOST_ACTIONS, check_seconds

if TYPE_CHECKING:
    from stagewright.schedule import Program
    from stagewright.schedule.automatic import StageTimes
    from stagewright.simulation import StageCosts

_MOST_SHOWN = 2**18
"""Maximum forwards and backwards of a timetable; more take minutes and show nothing."""


def _seconds(help: str) -> typer.models.OptionInfo:
    return typer.Option(min=0.0, metavar="SECONDS", help=help)


# fmt: off
@dataclass(frozen=True)
class Size:
    """The pipeline."""

    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Ranks of the pipeline.")] = 4
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="Microbatches per batch.")] = 8
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", help="Stages per rank; default: the schedule's.")] = None

    def check(self) -> None:
        """Raise `InputError` if the timetable would take minutes; the schedule's builder checks each number."""
        actions = 2 * self.ranks * self.microbatches * (self.chunks or 1)
        if _MOST_SHOWN < actions <= MOST_ACTIONS:
            raise InputError(
                f"{self.ranks:,} ranks with {self.microbatches:,} microbatches have {actions:,} forwards and backwards, "
                f"more than the {_MOST_SHOWN:,} that a timetable shows: give fewer --ranks or --microbatches"
            )


@dataclass(frozen=True)
class CostOptions:
    """Costs."""

    forward: Annotated[float, _seconds("Forward (F) of one microbatch on one stage.")] = 1.0
    input_grad: Annotated[float, _seconds("Gradients of its inputs (I); a whole backward (B) takes I plus W.")] = 1.0
    weight_grad: Annotated[float, _seconds("Gradients of its weights (W).")] = 1.0
    transfer: Annotated[float, _seconds("Transfer of its activations, or of their gradients, to another rank.")] = 0.0
    costs: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Costs per layer, CSV or JSON, instead of uniform ones.")] = None

    def given(self) -> GivenCosts:
        """Return the costs given on the command line."""
        names = ("forward", "input_grad", "weight_grad")
        if self.costs is not None:
            refuse(names, "--costs has the times of all actions", "give one time for all stages without --costs")
        for name in (*names, "transfer"):
            check_seconds(getattr(self, name), f"--{name.replace('_', '-')}")
        seconds = (self.forward, self.input_grad, self.weight_grad) if is_given(*names) else None
        return GivenCosts(self.costs, seconds, self.transfer if is_given("transfer") else None)
# fmt: on


@grouped
def schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME",
            help="gpipe, 1f1b, interleaved-1f1b, breadth-first, zb-h1, ... or a program file.")
    ],
    size: Size,
    costs: CostOptions,
    pictures: Pictures,
    memory_limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum activations (stage and microbatch) per rank.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the schedule.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Simulate a schedule and print its timetable.

    The program is checked first: complete, in order, free of deadlock. A program file that states its costs is simulated
    with them, unless other costs are given.

    Example:
        stagewright schedule zb-v --ranks 4 --microbatches 8
    """
    from stagewright.report.timelines import heading, rank_table, timeline_document
    from stagewright.schedule import verify
    from stagewright.schedule.builders import check_written, options_of
    from stagewright.simulation import simulate

    if is_program_file(name):
        refuse(
            ["ranks", "microbatches", "chunks", "options"],
            "a program file has its own ranks, stages, microbatches and order",
            "name a schedule instead of the file",
        )  # fmt: skip
    given_costs, transfer = costs.given(), costs.transfer
    pictures.check(name)
    schedule_options = parse_settings(options)
    check_written(name, schedule_options)
    if memory_limit is not None and "memory_limit" in options_of(name):
        schedule_options["memory_limit"] = float(memory_limit)
    if is_plan_file(name):
        raise InputError(f"'{name}' is a plan: `stagewright simulate {name}` shows its timetable")
    if is_program_file(name):
        program, prediction = read_predicted_program(Path(name))
        verify(program)
        costing = costing_of(given_costs, prediction, name, program.placement.rank_of_stage)
    else:
        costing = costing_of(given_costs, None, name)
        size.check()
        counts = memory_limit is not None
        program = verify(_program(name, size, costing.costs_of, transfer, schedule_options, counts))
    overhead = costing.overhead_s
    stage_costs = costing.costs_of(program.num_stages)
    timeline = simulate(program, stage_costs, costing.transfers, action_overhead_s=overhead)
    if memory_limit is not None and "memory_limit" not in schedule_options:
        _check_limit(program, memory_limit, costing.costs_of, transfer)
    pictures.write(timeline)
    cost_lines = (costing.origin,) if is_program_file(name) else ()
    document = timeline_document(program, timeline) | ({"costs": costing.origin} if cost_lines else {})
    if as_json:
        print_document(document)
        return
    show(heading(document), *cost_lines, "", *timetable(timeline), rank_table(document))


def _program(
    name: str,
    size: Size,
    costs_of: CostsOf,
    transfer: float,
    options: dict[str, Any],
    counts_activations: bool,
) -> Program:
    from stagewright.schedule import build
    from stagewright.schedule.builders import options_of

    if "times" in options_of(name):
        # One microbatch is enough to learn how many stages the schedule places.
        num_stages = build(name, size.ranks, 1, size.chunks).num_stages
        # An activation counts until its weight gradient is done, though half of its bytes may be freed before.
        held = 1.0 if counts_activations else 0.5
        options = {"times": _given_times(costs_of(num_stages), transfer, held), **options}
    return build(name, size.ranks, size.microbatches, size.chunks, **options)


def _given_times(costs: StageCosts, transfer: float, held: float) -> StageTimes:
    """Return the times for schedules that are built from them; the fraction `held` of an activation's memory is kept
    until its weight gradient."""
    import numpy as np

    from stagewright.schedule.automatic import StageTimes

    seconds, ones = (costs.forward_s, costs.input_grad_s, costs.weight_grad_s), np.ones(costs.num_stages)
    return StageTimes(*seconds, transfer * ones[1:], ones, held * ones)


def _check_limit(program: Program, limit: int, costs_of: CostsOf, transfer: float) -> None:
    """Raise `ScheduleError` if a rank holds more than `limit` activations; name the schedules that do not."""
    from stagewright.schedule.in_flight import peak_activations

    activations = peak_activations(program)
    rank = max(range(len(activations)), key=activations.__getitem__)
    if activations[rank] <= limit:
        return
    alternatives = ", ".join(_within(limit, program, costs_of, transfer))
    raise ScheduleError(
        f"{program.name} holds {activations[rank]} activations on rank {rank}, but the limit is {limit}: allow more, "
        + (
            f"use fewer microbatches, or a schedule that holds no more ({alternatives})"
            if alternatives
            else "or use fewer microbatches"
        )
    )


def _within(limit: int, program: Program, costs_of: CostsOf, transfer: float) -> Iterator[str]:
    """Yield the synchronous schedules that hold at most `limit` activations on any rank, at the size of `program`."""
    from stagewright.schedule import BUILDERS, Kind
    from stagewright.schedule.builders import options_of
    from stagewright.schedule.in_flight import peak_activations

    for name in BUILDERS:
        accepted = options_of(name)
        options = {"memory_limit": float(limit)} if "memory_limit" in accepted else {}
        num_microbatches = program.num_microbatches
        if "times" in accepted:
            # Ordering long batches by times takes long, and they hold no more than short ones.
            num_microbatches = min(num_microbatches, 2 * program.num_ranks)
        try:
            size = Size(program.num_ranks, num_microbatches)
            built = _program(name, size, costs_of, transfer, options, True)
        except (InputError, ScheduleError):
            continue  # it does not support this size, or has more stages than there are layers
        if max(peak_activations(built)) <= limit and all(action.kind is not Kind.STEP for action in built):
            yield name
