"""`stagewright check`: would a plan hang, overflow memory or not fit its model? Would a schedule file run?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.check_program import check_program, holds_program
from stagewright.cli.failure import exit_code
from stagewright.cli.options import Json
from stagewright.cli.output import print_document, show
from stagewright.cli.planning import PlannedCluster, cluster_of
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse
from stagewright.errors import PlanError, StagewrightError

if TYPE_CHECKING:
    from stagewright.planning.pipeline import Pipeline
    from stagewright.planning.plan import Plan

_TOLERANCE = 0.03
"""Part by which the memory of the model as it is now may differ from what the plan says."""


def check(
    context: typer.Context,
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A plan.json, or a schedule: the CSV of torch.distributed.pipelining, or a program as .txt or .json.",
        ),
    ],
    cluster: PlannedCluster = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Of a schedule: microbatches it must have; default those it names."),
    ] = None,
    max_activations: Annotated[
        int | None,
        typer.Option(min=1, help="Of a schedule: most activations (stage and microbatch) on a rank."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a plan or a schedule file would run, before any machine is booked.

    Exit code 0 if it would. If not: 2 with the reason for a plan, 1 with all findings for a schedule.
    """
    if holds_program(plan):
        refuse(
            context,
            ["cluster"],
            "a schedule file says nothing of times and bytes",
            "check the plan it is from",
        )
        check_program(plan, microbatches, max_activations, as_json)
        return
    refuse(
        context, ["microbatches", "max_activations"], f"{plan} is a plan, with a number of microbatches and a memory",
        "check a schedule file",
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    failure: StagewrightError | None = None
    with Progress(f"checking {plan}") as progress:
        try:
            for name, detail in _checks(plan, cluster, progress):
                found.append({"check": name, "passed": True, "detail": detail})
        except StagewrightError as error:
            failure = error
            found.append({"check": "", "passed": False, "detail": str(error)})
    if as_json:
        print_document({"passed": failure is None, "checks": found})
        if failure is not None:
            raise typer.Exit(exit_code(failure))
        return
    for one in found:
        if one["passed"]:
            show(f"ok  {one['check']}: {one['detail']}")
    if failure is not None:
        raise failure


def _checks(path: Path, cluster: str | None, report: Progress) -> Iterator[tuple[str, str]]:
    """Name and finding of each check that passes; the first that does not raises."""
    from stagewright.planning.estimate import line_of
    from stagewright.planning.plan import load_plan
    from stagewright.planning.plan_stages import stage_program
    from stagewright.report.plans import batch_text, widths

    plan = load_plan(path)
    yield "document", f"version {plan.version}, {plan.num_stages} stages on {widths(plan)} ranks"
    yield "gradients", batch_text(plan)
    program = stage_program(plan)
    yield "program", f"{plan.schedule}: {program.num_actions} actions, each once, in order, free of deadlock"
    line = line_of(plan, cluster_of(plan, cluster), report)
    operators = sum(stage.stop - stage.start for stage in line.stages)
    yield "model", f"{plan.model.text}: all {operators} forward operators, each on one stage"
    yield "transfers", _check_transfers(line)
    yield "memory", _check_memory(plan, line)


def _check_transfers(line: Pipeline) -> str:
    from stagewright.estimation.memory import stage_edges
    from stagewright.schedule import insert_communication, verify

    edges = stage_edges(line.stages)
    lowered = verify(insert_communication(line.program, edges), edges)
    count = lowered.num_actions - line.program.num_actions
    return f"{count} sends and receives, matched and in one order; no deadlock even if every send blocks"


def _check_memory(plan: Plan, line: Pipeline) -> str:
    from stagewright.planning.pipeline import reserved_bytes
    from stagewright.planning.predict import rank_memories
    from stagewright.units import format_bytes

    memories = rank_memories(line)
    for memory in memories:
        device = line.device_of(memory.rank)
        needed, limit = reserved_bytes(memory, device), line.usable_bytes(memory.rank)
        if needed > limit:
            raise PlanError(
                f"rank {memory.rank} needs {format_bytes(needed)} at {memory.at}, "
                f"{format_bytes(needed - limit)} more than it may use ({format_bytes(limit)}): plan again"
            )
    for memory, predicted in zip(memories, plan.predictions.ranks, strict=False):  # of all ranks or of none
        if abs(memory.peak_bytes - predicted.allocated_peak_bytes) > _TOLERANCE * memory.peak_bytes:
            raise PlanError(
                f"rank {memory.rank} needs {format_bytes(memory.peak_bytes)}, but the plan says "
                f"{format_bytes(predicted.allocated_peak_bytes)}: plan again"
            )
    fullest = max(memories, key=lambda memory: memory.peak_bytes)
    limit = line.usable_bytes(fullest.rank)
    return f"at most {format_bytes(fullest.peak_bytes)} (rank {fullest.rank}) of {format_bytes(limit)}"
