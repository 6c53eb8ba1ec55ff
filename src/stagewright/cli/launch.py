"""`stagewright launch`: a user's training script in one process per rank of a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.consent import say_what_runs
from stagewright.cli.options import PlanFile
from stagewright.errors import InputError


def launch(
    plan: PlanFile,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file that creates a stagewright.Trainer.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Arguments of the script, after --.")] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds within which every rank must create its Trainer.")] = 300.0,
) -> None:  # fmt: skip
    """Run a script, one process per rank of a plan.

    `stagewright.Trainer()` in it takes this plan. On several machines, start the script with torchrun instead.

    Example:
        stagewright launch plan.json train.py
    """
    from stagewright.execution.launch import start_plan
    from stagewright.execution.launch_environment import PLAN, START_TIMEOUT
    from stagewright.execution.preflight import refuse_what_is_not_run
    from stagewright.planning.plan import load_plan

    loaded = load_plan(plan)
    if not script.is_file():
        raise InputError(f"script '{script}' is not there: check the path")
    refuse_what_is_not_run(loaded, str(plan))
    say_what_runs(loaded.model.text)
    say_what_runs(loaded.job.optimizer)
    os.environ |= {PLAN: str(Path(plan).resolve()), START_TIMEOUT: str(start_timeout)}
    start_plan(loaded, "stagewright.execution.script", [str(script), *(arguments or [])], start_timeout)
