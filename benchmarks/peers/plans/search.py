"""The plans of another system's planner for a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peers.plans.strategies import STRATEGIES, Strategy
from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError, nearest
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.advice import misses_memory
from stagewright.planning.bounds.coarse import Trace
from stagewright.planning.candidate import Candidate, make_plan
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.planning.ranking import ranked
from stagewright.planning.search import over_lengths
from stagewright.planning.search_result import Excluded, SearchResult
from stagewright.planning.space import Space, microbatch_sizes, obstacle, parallel_degrees, pipelines
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_bytes


def plan_with(
    strategy: str,
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    report: Callable[[str], None] = lambda stage: None,
    pp: int | None = None,
    dp: int | None = None,
    microbatch: int | None = None,
    trace: Trace = cached_trace,
) -> SearchResult:
    """What the planner named `strategy` makes of every width and microbatch size (or of those given), best first.

    Raises:
        InputError: no planner of that name; the model, device or a width cannot be used as given.
        PlanError: nothing it makes fits, at each length of the job.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            f"strategy = {strategy!r}{nearest(strategy, STRATEGIES)}: use {', '.join(STRATEGIES)}"
        )
    job.check_devices(cluster)
    reference = model if isinstance(model, ModelReference) else resolve(model)
    space = Space(tp=1, cp=1, ep=1, pp=pp, dp=dp, microbatch=microbatch)
    (whole,) = parallel_degrees(cluster, job, space)
    sizes = microbatch_sizes(whole, cluster, job, space)
    if not any(_shares(whole, size, cluster, job, space) for size in sizes):
        raise InputError(obstacle(cluster, job, space))
    plans: list[Plan] = []
    excluded: list[Excluded] = []
    misses: list[Candidate] = []
    refused: PlanError | None = None
    for size in sizes:
        report(f"tracing microbatches of {size}")
        graph = trace(reference, size, report=report, **job.traced(cluster.device.kind))
        model_costs = costs_of_model(graph, cluster, job)
        num_smaller = len(plans)
        for configuration in _shares(whole, size, cluster, job, space):
            report(f"{strategy}: {configuration}")
            named = replace(configuration, schedule=strategy)
            try:
                made = _planned(STRATEGIES[strategy], model_costs, configuration, cluster, job, reference)
            except PlanError as error:
                refused = refused or error
                excluded.append(Excluded.of(named, str(error), None, lacks_memory=False))
                continue
            if isinstance(made, Plan):
                plans.append(made)
            else:
                misses += [] if made is None else [made]
                excluded.append(_missed(made, named))
        if plans and len(plans) == num_smaller:
            break
    if plans:
        beyond = job.beyond(cluster.device)
        result = SearchResult(ranked(plans), excluded, [] if beyond is None else [beyond])
        return over_lengths(result, cluster, report, trace)
    if misses:
        raise misses_memory(min(misses, key=lambda one: one.excess_bytes), job)
    raise refused or PlanError(
        f"no configuration fits under strategy '{strategy}': use another, or more devices"
    )


def _shares(whole: Configuration, size: int, cluster: Cluster, job: Job, space: Space) -> list[Configuration]:
    """Pipelines that have whole microbatches of `size` samples, the deepest first."""
    shapes = pipelines(replace(whole, microbatch=size), cluster, job, space, cluster.num_devices)
    return list(shapes)[::-1]


def _planned(
    strategy: Strategy,
    model_costs: RangeCosts,
    configuration: Configuration,
    cluster: Cluster,
    job: Job,
    reference: ModelReference,
) -> Plan | Candidate | None:
    """The plan of `strategy` for a configuration, or the candidate that lacks memory, or None if it has neither.

    Raises:
        PlanError: the model cannot be cut into so many stages.
    """
    found = strategy.candidate(model_costs, configuration, cluster, job)
    if found is None or found.excess_bytes > 0:
        return found
    made = make_plan(found, model_costs, reference)
    lost = made.predictions.reserved_peak_bytes - job.usable_bytes(cluster.device)
    return made if lost <= 0 else replace(found, excess_bytes=lost)  # to fragmentation, which none foresees


def _missed(found: Candidate | None, configuration: Configuration) -> Excluded:
    if found is None:
        return Excluded.of(configuration, "nothing it gives up makes it fit", None, lacks_memory=True)
    missing = found.excess_bytes
    return Excluded.of(
        configuration, f"lacks {format_bytes(missing)} of memory a device", missing, lacks_memory=True
    )
