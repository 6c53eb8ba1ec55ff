"""`stagewright simulate`: the timetable of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.cli.options import Json, PlanFile
from stagewright.cli.output import print_document, show
from stagewright.cli.pictures import Dark, Html, Pictures, Png, Svg, Trace
from stagewright.cli.planning import PlannedCluster, cluster_of
from stagewright.cli.progress import Progress

if TYPE_CHECKING:
    from stagewright.planning.pipeline import Pipeline
    from stagewright.report.pictures.scene import Curve
    from stagewright.simulation import Timeline


def simulate(
    plan: PlanFile,
    cluster: PlannedCluster = None,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    trace: Trace = None,
    dark: Dark = False,
    as_json: Json = False,
) -> None:
    """Simulate a plan and print its timetable."""
    from stagewright.planning.estimate import line_of
    from stagewright.planning.plan import load_plan
    from stagewright.planning.predict import rank_memories, run_timeline
    from stagewright.report.timelines import heading, rank_table, timeline_document

    pictures = Pictures(svg, png, html, trace, dark)
    pictures.check(plan)
    loaded = load_plan(plan)
    with Progress(f"simulating {plan}") as progress:
        line = line_of(loaded, cluster_of(loaded, cluster), progress)
        timeline = run_timeline(line)
        peaks = [memory.peak_bytes for memory in rank_memories(line)]
        pictures.write(timeline, lambda: _curves(line, timeline))
    document = timeline_document(line.program, timeline, peaks)
    if as_json:
        print_document(document)
        return
    from stagewright.report.console import stdout
    from stagewright.report.timetable import picture

    console = stdout()
    show(heading(document), "", *picture(timeline, console.width, console.is_terminal), rank_table(document))


def _curves(line: Pipeline, timeline: Timeline) -> list[Curve]:
    """Imported only when a picture is asked for."""
    from stagewright.report.pictures.plan_memory import plan_curves

    return plan_curves(line, timeline)
