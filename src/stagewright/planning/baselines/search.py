"""The plans of another system's planner for a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError, nearest
from stagewright.estimation.stages import BodyCosts
from stagewright.planning.advice import misses_memory
from stagewright.planning.baselines.strategies import STRATEGIES
from stagewright.planning.candidate import Candidate, Choice, make_plan
from stagewright.planning.found import Excluded, Found, UntilCtrlC
from stagewright.planning.job import Job
from stagewright.planning.pipeline import costing
from stagewright.planning.plan import Plan
from stagewright.planning.ranking import ranked
from stagewright.planning.search import Trace, over_lengths
from stagewright.planning.widths import microbatch_sizes, widths_of
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
    interruptible: bool = False,
) -> Found:
    """What the planner named `strategy` makes of every width and microbatch size (or of those given), best first.

    Ctrl-C ends an `interruptible` search with the plans so far, once there is one.

    Raises:
        InputError: no planner of that name; the model, device or a width cannot be used as given.
        PlanError: nothing it makes fits, at each length of the job.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            f"strategy = {strategy!r}{nearest(strategy, STRATEGIES)}: use {', '.join(STRATEGIES)}"
        )
    reference = model if isinstance(model, ModelReference) else resolve(model)
    widths = widths_of(cluster, job, pp, dp)
    plans: list[Plan] = []
    excluded: list[Excluded] = []
    misses: list[Candidate] = []
    refused: PlanError | None = None
    with UntilCtrlC(interruptible, plans) as searching:
        for size in microbatch_sizes(widths, job, microbatch):
            report(f"tracing microbatches of {size}")
            graph = trace(reference, size, report=report, **job.traced(cluster.device.kind))
            body = BodyCosts(graph, costing(graph, cluster, job))
            fitted = False
            for choice in _choices(widths, job, size):
                report(f"{strategy}: {choice}")
                try:
                    found = STRATEGIES[strategy].candidate(body, choice, cluster, job)
                except PlanError as error:
                    refused = refused or error
                    excluded.append(Excluded(str(error), choice.dp, choice.pp, size, strategy))
                    continue
                if found is not None and found.excess_bytes <= 0:
                    made = make_plan(found, body, reference)
                    lost = made.predictions.reserved_peak_bytes - job.usable_bytes(cluster.device)
                    if lost <= 0:
                        fitted = True
                        plans.append(made)
                        continue
                    found = replace(found, excess_bytes=lost)  # to fragmentation, which no planner foresees
                misses += [found] if found is not None else []
                excluded.append(_missed(found, choice, strategy))
            if not fitted and plans:
                break
    if plans:
        beyond = job.beyond(cluster.device)
        result = Found(ranked(plans), excluded, [] if beyond is None else [beyond])
        return over_lengths(searching.told(result), cluster, report, trace)
    if misses:
        raise misses_memory(min(misses, key=lambda one: one.excess_bytes), job)
    raise refused or PlanError(
        f"no configuration fits under strategy '{strategy}': use another, or more devices"
    )


def _choices(widths: list[tuple[int, int]], job: Job, size: int) -> list[Choice]:
    return [
        Choice(dp, pp, size, job.global_batch // dp // size, "1f1b")
        for dp, pp in widths
        if job.global_batch // dp % size == 0
    ]


def _missed(found: Candidate | None, choice: Choice, strategy: str) -> Excluded:
    if found is None:
        return Excluded(
            "nothing it gives up makes it fit", choice.dp, choice.pp, choice.microbatch_size, strategy
        )
    missing = found.excess_bytes
    reason = f"lacks {format_bytes(missing)} of memory a device"
    return Excluded(reason, choice.dp, choice.pp, choice.microbatch_size, strategy, missing)
