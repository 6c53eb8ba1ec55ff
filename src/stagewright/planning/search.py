"""The search for the best plans: a best-first search over configurations, whose best plans are then improved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.cluster import Cluster, given_cluster
from stagewright.errors import PlanError
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.machine import collecting_seldom
from stagewright.planning.best_first import Request, Search
from stagewright.planning.bounds.coarse import Trace
from stagewright.planning.estimate import graph_of
from stagewright.planning.improvement import improve
from stagewright.planning.job import Job, given_job
from stagewright.planning.memory.host_optimizer import check_host_optimizer
from stagewright.planning.search_result import EarlyEnd, SearchResult
from stagewright.planning.sequence_lengths import best_over_lengths
from stagewright.planning.space import Space
from stagewright.text import silent
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.units import format_seconds


@collecting_seldom()
def plan(
    model: str | Path | ModelReference,
    cluster: Cluster | str | Path,
    job: Job | Mapping[str, Any] | str | Path,
    space: Space | None = None,
    *,
    keep: int | None = None,
    report: Callable[[str], None] | None = None,
    trace: Trace | None = None,
    patience_s: float | None = None,
    below_s: float = math.inf,
    **within: Any,
) -> SearchResult:
    """Return the best plans of `model` for `cluster` and `job`, under the job's runtime.

    Where links were measured, the device order suits them. On a cluster with several kinds of devices, each stage gets as
    much of the model as its devices have speed and memory for; the fast devices come first or last.

    Args:
        cluster: a cluster, its name in the catalog or its file.
        job: a job, a dict of its fields or its file.
        space: the search space; by default everything that the runtime supports.
        keep: number of plans; by default all that had to be evaluated to find the best, at most five.
        within: fields of `Space` by name, in place of those of `space`.
        report: called with a line of text about the progress.
        trace: makes operator graphs; default: `stagewright.tracing.cache.trace`, whose arguments it takes.
        patience_s: seconds after which the search ends with the plans so far, or as soon as there is one, and a warning; so
            it does on Ctrl-C and SIGTERM, at any time if infinite. A finite time needs the main thread. None: all is tried.
        below_s: configurations whose steps take this long or longer are left out, even if improvements to their plans might
            make them faster.

    Raises:
        InputError: the model, device or a parallel degree cannot be used as given, or nothing is left to try.
        TraceError: the model cannot be traced.
        PlanError: no configuration fits; the message has the missing memory of the best, and what would fit. Or none takes
            less than `below_s`.
        KeyboardInterrupt: Ctrl-C before there is a plan; with `below_s`, also the end of `patience_s`.
    """
    report, trace = report or silent, trace or cached_trace
    cluster, job = given_cluster(cluster), given_job(job)
    reference = model if isinstance(model, ModelReference) else resolve(model)
    space = Space.of(space, **within)
    job.check_stages()
    job.check_runtime()
    job = job.with_state(reference)
    job.check_devices(cluster)
    check_host_optimizer(space.host_optimizer, cluster)
    space.check(cluster, job)
    request = Request(reference, cluster, job, space.of_runtime(job), keep, below_s)
    is_bounded = below_s < math.inf
    search = Search(request, report, trace, shows_first=patience_s is not None and not is_bounded)
    with EarlyEnd(patience_s, lambda: is_bounded or search.fastest is not None) as searching, search:
        search.gather()
        search.work_out()
        if job.runtime == STAGEWRIGHT and (space.is_improved or not search.fits):
            improve(search)
    if is_bounded and not search.fits:
        if searching.what is not None:
            raise KeyboardInterrupt(searching.what)
        raise PlanError(
            f"on cluster '{cluster.name}' no configuration takes less than {format_seconds(below_s)} a step"
        )
    return over_lengths(searching.annotated(search.result(), search.gap), cluster, report, trace)


def over_lengths(
    result: SearchResult,
    cluster: Cluster,
    report: Callable[[str], None] = silent,
    trace: Trace = cached_trace,
) -> SearchResult:
    """Return `result` with its plans judged over all sequence lengths of the job, best first.

    Raises:
        PlanError: the model has other operators at some length, or no plan fits at all of them.
    """
    if not result.plans[0].job.sequence_lengths:
        return result
    report("judging all sequence lengths")
    judged = best_over_lengths(result.plans, cluster, lambda plan: graph_of(plan, report, trace))
    return replace(result, plans=judged)
