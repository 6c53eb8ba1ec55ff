"""A plan made ready to be simulated and checked: its model traced and cut, on its cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagewright.errors import PlanError

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.graph import OperatorGraph
    from stagewright.planning.plan import Plan
    from stagewright.planning.predict import Pipeline


def graph_of(plan: Plan, report: Callable[[str], None]) -> OperatorGraph:
    """The graph of the model that `plan` was made for.

    Raises:
        PlanError: the model has changed since.
    """
    from stagewright.tracing.cache import trace
    from stagewright.tracing.models.reference import resolve

    reference = resolve(plan.model.text, plan.model.overrides)
    if reference.digest != plan.model.digest:
        raise PlanError(f"model '{plan.model.text}' has changed since the plan was made: plan again")
    job = plan.job
    return trace(reference, plan.microbatch_size, job.sequence_length, job.torch_name, report=report)


def line_of(plan: Plan, cluster: Cluster, report: Callable[[str], None]) -> Pipeline:
    """The carved model of `plan` with its program on `cluster`.

    Raises:
        PlanError: the model has changed, or does not have the plan's cuts.
        ScheduleError: the program does not run.
    """
    from stagewright.estimation.stages import BodyCosts
    from stagewright.estimation.time import Costing
    from stagewright.planning.plan import stage_cuts, stage_program
    from stagewright.planning.predict import pipeline

    graph = graph_of(plan, report)
    body = BodyCosts(graph, Costing(graph, cluster.device))
    return pipeline(body, stage_cuts(plan, graph), stage_program(plan), cluster, plan.job, plan.dp)
