"""`stagewright compare`: what a plan predicted beside what its run measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.options import Json, PlanFile, PlannedCluster, cluster_of, warn
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.execution.record import Record
    from stagewright.planning.plan import Plan
    from stagewright.simulation import Timeline


def compare(
    plan: PlanFile,
    record: Annotated[
        Path, typer.Argument(metavar="RECORD", help="The record.json that `stagewright run` wrote.")
    ],
    cluster: PlannedCluster = None,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:
    """Compare a plan's predictions with a run's record.

    No code of its model runs unless --with-model allows it.

    Example:
        stagewright compare plan.json runs/llama/record.json
    """
    from stagewright.execution.record import clock_error_seconds, load_record, timeline_of
    from stagewright.planning.plan import load_plan
    from stagewright.report.comparison import both_pictures, comparison_document, comparison_table, in_words
    from stagewright.report.runs import as_timed, longest_not_run, machine_lines

    ran = load_record(record)
    whole = load_plan(plan)
    loaded = as_timed(whole, ran)
    measured = timeline_of(ran, loaded)
    with Progress(f"simulating {plan}") as progress:
        planned = cluster_of(loaded, cluster)
        predicted = _predicted(loaded, cluster, with_model, progress)
    document = comparison_document(loaded, ran, predicted, measured, clock_error_seconds(ran))
    warn([*longest_not_run(whole, ran), *_warnings(ran, planned)])
    if as_json:
        print_document(document)
        return
    from stagewright.report.console import stdout

    console = stdout()
    pictures = both_pictures(predicted, measured, console.width, console.is_terminal)
    ratios = [ratio for rank in ran.ranks for ratio in ran.slowdowns(rank)]
    told = machine_lines(ran.slowdown, ratios)
    show(comparison_table(document), *pictures, "", in_words(document), *told)


def _predicted(plan: Plan, cluster: str | None, with_model: bool, report: Progress) -> Timeline:
    """What the plan promises, or what it would take on another cluster."""
    from stagewright.planning.estimate import line_of
    from stagewright.planning.plan_stages import stage_program
    from stagewright.planning.prediction.predict import run_timeline
    from stagewright.planning.prediction.step_times import simulated

    if cluster is None and plan.predictions.costs is not None:
        return simulated(stage_program(plan), plan.predictions.costs)
    what = "a plan that does not state its costs" if cluster is None else "what another cluster would take"
    allow_model(plan, with_model, f"comparing {what}")
    return run_timeline(line_of(plan, cluster_of(plan, cluster), report))


def _warnings(record: Record, planned: Cluster) -> list[str]:
    """Why the two should not be expected to agree."""
    from stagewright.report.runs import on_other_devices

    found = on_other_devices(record, planned.device.kind, planned.device.name)
    if record.is_going_on:
        done = record.first_step + len(record.losses)
        found.insert(0, f"the run was still going on when this was written, after step {done}")
    if record.timed_steps[-1] in record.metered_steps:
        more = "3 steps or more" if record.timed_length is None else "each length three times or more"
        found.insert(
            0, f"the record's times are of a step whose memory was counted, which is slow: run {more}"
        )
    return found
