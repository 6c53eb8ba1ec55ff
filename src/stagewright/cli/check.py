"""`stagewright check`: would a plan hang, overflow memory or not fit its model? Would a schedule file run?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.check_program import check_program, holds_program
from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.failure import exit_code
from stagewright.cli.options import Json, PlannedCluster, cluster_of
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse
from stagewright.errors import InputError, PlanError, StagewrightError
from stagewright.units import format_bytes

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.planning.plan import Plan
    from stagewright.planning.prediction.pipeline import Pipeline


def check(
    context: typer.Context,
    plan: Annotated[
        Path, typer.Argument(metavar="FILE",
            help="A plan.json, or a schedule: the CSV of torch.distributed.pipelining, or a program as .txt or .json.")
    ],
    cluster: PlannedCluster = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of a schedule: microbatches it must have; default those it names.")] = None,
    max_activations: Annotated[
        int | None, typer.Option(min=1, help="Of a schedule: most activations (stage and microbatch) on a rank.")] = None,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check that a plan or a schedule file would run.

    Before any machine is booked: would it hang, overflow memory, or not fit the model? No code of a plan's model runs unless
    --with-model allows it. Exit code 0 if all is well. If not: 2 with the reason for a plan, 1 with all findings for a
    schedule.

    Example:
        stagewright check plan.json
    """
    if holds_program(plan):
        why = "a schedule file says nothing of times and bytes"
        refuse(context, ["cluster", "with_model"], why, "check the plan it is from")
        check_program(plan, microbatches, max_activations, as_json)
        return
    why = f"{plan} is a plan, with a number of microbatches and a memory"
    refuse(context, ["microbatches", "max_activations"], why, "check a schedule file")
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    failure: StagewrightError | None = None
    with Progress(f"checking {plan}") as progress:
        try:
            for name, detail in _checks(plan, cluster, with_model, left_out, progress):
                found.append({"check": name, "passed": True, "detail": detail})
        except StagewrightError as error:
            failure = error
            found.append({"check": "", "passed": False, "detail": str(error)})
    if as_json:
        print_document({"passed": failure is None, "checks": found, "left_out": left_out})
        if failure is not None:
            raise typer.Exit(exit_code(failure))
        return
    show(*(f"ok  {one['check']}: {one['detail']}" for one in found if one["passed"]))
    if failure is not None:
        raise failure
    show(*(f"--  {one['check']}: not checked, {one['why']}" for one in left_out))


def _checks(
    path: Path, cluster: str | None, with_model: bool, left_out: list[dict[str, str]], report: Progress
) -> Iterator[tuple[str, str]]:
    """Name and finding of each check that passes; the first that does not raises. Adds to `left_out` what needs code."""
    from stagewright.planning.plan import load_plan
    from stagewright.planning.plan_stages import stage_program
    from stagewright.planning.promises import check_promised_time
    from stagewright.report.plans import batch_text, widths

    plan = load_plan(path)
    yield "document", f"version {plan.version}, {plan.num_stages} stages on {widths(plan)} ranks"
    yield "gradients", batch_text(plan)
    program = stage_program(plan)
    yield "program", f"{plan.schedule}: {program.num_actions} actions, each once, in order, free of deadlock"
    if plan.predictions.costs is not None:
        yield "time", check_promised_time(plan, plan.predictions.costs)
    why = None if with_model or cluster is not None else _without_model(plan)
    if why is not None:
        yield from _checks_of_promises(plan, why, left_out)
        return
    allow_model(plan, with_model, "a check on another cluster")
    yield from _checks_of_model(plan, cluster, report)


def _without_model(plan: Plan) -> str | None:
    """Why the model of a plan is not built unless that is asked for: it is code, or it is not here. None: it is built."""

    if plan.model.is_code:
        return f"as building it runs {plan.model.text}; --with-model allows it"
    try:
        plan.model.reference()
    except InputError as error:
        return f"as it is not here: {error}"
    return None


def _checks_of_promises(plan: Plan, why: str, left_out: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """What is left to check of a plan whose model is not built, and `why`."""
    from stagewright.planning.plan_stages import stage_program
    from stagewright.planning.promises import check_promised_memory, check_transfers

    left_out.append({"check": "model", "why": why})
    if plan.predictions.costs is None:
        why = "as the plan does not say what its stages send; --with-model finds out"
        left_out.append({"check": "transfers", "why": why})
    else:
        edges = tuple((one.source, one.target) for one in plan.predictions.costs.transfers)
        yield "transfers", check_transfers(stage_program(plan), edges)
    if plan.predictions.ranks:
        yield "memory", check_promised_memory(plan, cluster_of(plan, None))
    else:
        left_out.append({"check": "memory", "why": "as the plan predicts none; --with-model finds out"})


def _checks_of_model(plan: Plan, cluster: str | None, report: Progress) -> Iterator[tuple[str, str]]:
    """What can be checked of a plan in the model as it is now."""
    from stagewright.estimation.memory import stage_edges
    from stagewright.planning.estimate import line_of
    from stagewright.planning.promises import check_transfers

    line = line_of(plan, cluster_of(plan, cluster), report)
    operators = sum(stage.stop - stage.start for stage in line.stages)
    yield "model", f"{plan.model.text}: all {operators} forward operators, each on one stage"
    yield "transfers", check_transfers(line.program, stage_edges(line.stages))
    yield "memory", _check_loop(plan, line.cluster) if plan.job.profile.loop else _check_memory(plan, line)


def _check_loop(plan: Plan, cluster: Cluster) -> str:
    """Of a runtime without stages."""
    from stagewright.planning.estimate import estimate
    from stagewright.planning.promises import check_promised_memory

    again = estimate(plan, cluster)
    _check_said("it", *(one.predictions.ranks[0].allocated_peak_bytes for one in (again, plan)))
    return check_promised_memory(again, cluster)


def _check_memory(plan: Plan, line: Pipeline) -> str:
    from stagewright.planning.prediction.pipeline import reserved_bytes
    from stagewright.planning.prediction.predict import rank_memories

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
        _check_said(f"rank {memory.rank}", memory.peak_bytes, predicted.allocated_peak_bytes)
    fullest = max(memories, key=lambda memory: memory.peak_bytes)
    limit = line.usable_bytes(fullest.rank)
    return f"at most {format_bytes(fullest.peak_bytes)} (rank {fullest.rank}) of {format_bytes(limit)}"


def _check_said(who: str, needed: int, said: int) -> None:
    from stagewright.planning.promises import TOLERANCE

    if abs(needed - said) > TOLERANCE * needed:
        raise PlanError(
            f"{who} needs {format_bytes(needed)}, but the plan says {format_bytes(said)}: plan again"
        )
