"""`stagewright simulate`: the timetable of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.groups import grouped
from stagewright.cli.options import Json, PlanFile, PlannedCluster, warn
from stagewright.cli.output import print_document, show, timetable
from stagewright.cli.pictures import Pictures
from stagewright.cli.progress import Progress
from stagewright.errors import StagewrightError
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from stagewright.planning.plan import Plan
    from stagewright.planning.prediction.staged_model import StagedModel
    from stagewright.report.pictures.scene import Curve
    from stagewright.simulation import Timeline


@grouped
def simulate(
    plan: PlanFile,
    pictures: Pictures,
    cluster: PlannedCluster = None,
    with_model: WithModel = False,
    as_json: Json = False,
) -> None:
    """Simulate a plan and print its timetable.

    Shows what the plan predicts, or what it would take on another cluster. No code of its model runs unless --with-model
    allows it.

    Example:
        stagewright simulate plan.json --html timeline.html
    """
    from stagewright.planning.plan import load_plan
    from stagewright.planning.plan_stages import stage_program
    from stagewright.planning.prediction.predict import rank_memories, step_costs
    from stagewright.planning.prediction.step_times import simulated, whole_step_seconds
    from stagewright.report.timelines import heading, rank_table, timeline_document

    pictures.check(plan)
    loaded = load_plan(plan)
    with Progress(f"simulating {plan}") as progress:
        staged = _staged_model(loaded, cluster, with_model, bool(pictures.files), progress)
        costs = loaded.predictions.costs
        peaks = [rank.allocated_peak_bytes for rank in loaded.predictions.ranks] or None
        if cluster is not None or costs is None:
            assert staged is not None
            costs, peaks = step_costs(staged), [memory.peak_bytes for memory in rank_memories(staged)]
        program = stage_program(loaded)
        timeline = simulated(program, costs)
        shown_plan = loaded if cluster is None else None  # its figures hold for its own cluster only
        pictures.write(timeline, lambda: None if staged is None else _curves(staged, timeline), shown_plan)
    step = whole_step_seconds(timeline, costs)
    document = timeline_document(program, timeline, peaks) | {"step_seconds": step}
    if as_json:
        print_document(document)
        return
    show(heading(document), f"{format_seconds(step)} per step, with the optimizer", "")
    show(*timetable(timeline), rank_table(document))


def _staged_model(
    plan: Plan, cluster: str | None, with_model: bool, draws: bool, report: Progress
) -> StagedModel | None:
    """Return the staged model where the plan's predictions do not suffice: on another cluster, without costs, and for the
    bytes in a picture."""
    from stagewright.planning.estimate import staged_model_of
    from stagewright.planning.plan import cluster_of

    if cluster is not None or plan.predictions.costs is None:
        what = "a plan that does not state its costs" if cluster is None else "a plan on another cluster"
        allow_model(plan, with_model, f"simulating {what}")
        return staged_model_of(plan, cluster_of(plan, cluster), report)
    if not draws:
        return None
    try:
        allow_model(plan, with_model, "memory over time")
        return staged_model_of(plan, plan.cluster.load(), report)
    except StagewrightError as error:
        warn([f"the picture counts activations instead of bytes: {error}"])
        return None


def _curves(staged: StagedModel, timeline: Timeline) -> list[Curve]:
    """Return the memory curves; imported here, as only pictures need them."""
    from stagewright.report.pictures.plan_memory import plan_curves

    return plan_curves(staged, timeline)
