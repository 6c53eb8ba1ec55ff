"""`stagewright check`: checks that a plan or a schedule file would run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.check_program import check_program, holds_program
from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.failure import exit_code
from stagewright.cli.options import Json, PlannedCluster
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse


def check(
    plan: Annotated[
        Path, typer.Argument(metavar="FILE",
            help="A plan.json, or a schedule: the CSV of torch.distributed.pipelining, or a program as .txt or .json.")
    ],
    cluster: PlannedCluster = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="For a schedule: microbatches it must have; default: those it names.")] = None,
    max_activations: Annotated[
        int | None, typer.Option(min=1, help="For a schedule: most activations (stage and microbatch) on a rank.")] = None,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check that a plan or a schedule file would run.

    Tells before any machine is booked whether it would hang, overflow memory or not fit the model. No code of a plan's
    model runs unless --with-model allows it. Exit code 0 if all is well, otherwise 2 with the reason for a plan, 1 with all
    findings for a schedule.

    Example:
        stagewright check plan.json
    """
    from stagewright.planning.checks import check as checked

    if holds_program(plan):
        why = "a schedule file has no times or bytes"
        refuse(["cluster", "with_model"], why, "check the plan that it comes from")
        check_program(plan, microbatches, max_activations, as_json)
        return
    why = f"{plan} is a plan, with its own number of microbatches and memory limit"
    refuse(["microbatches", "max_activations"], why, "check a schedule file")
    with Progress(f"checking {plan}") as progress:
        outcome = checked(
            plan, cluster, with_model=with_model, report=progress,
            allow=lambda loaded, what: allow_model(loaded, with_model, what),
        )  # fmt: skip
    if as_json:
        results = [
            {"check": name, "passed": True, "detail": detail} for name, detail in outcome.passed.items()
        ]
        if outcome.fault is not None:
            results.append({"check": "", "passed": False, "detail": str(outcome.fault)})
        left_out = [asdict(skipped) for skipped in outcome.left_out]
        print_document({"passed": outcome.fault is None, "checks": results, "left_out": left_out})
        if outcome.fault is not None:
            raise typer.Exit(exit_code(outcome.fault))
        return
    show(*(f"ok  {name}: {detail}" for name, detail in outcome.passed.items()))
    if outcome.fault is not None:
        raise outcome.fault
    show(*(f"--  {skipped.check}: not checked, {skipped.why}" for skipped in outcome.left_out))
