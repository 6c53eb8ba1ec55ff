"""Plans in which the hosts' processors are ranks of the pipeline, with whole stages of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stagewright.cluster import Cluster, with_hosts
from stagewright.errors import InputError, PlanError
from stagewright.planning.found import Excluded, Found, UntilCtrlC
from stagewright.planning.job import Job
from stagewright.planning.ranking import ranked
from stagewright.planning.search import plan
from stagewright.planning.space import Space
from stagewright.tracing.models.reference import ModelReference


def plan_with_hosts(
    reference: ModelReference,
    cluster: Cluster,
    job: Job,
    space: Space | None = None,
    *,
    interruptible: bool = False,
    keep: int | None = None,
    report: Callable[[str], None] = lambda stage: None,
    **within: Any,
) -> Found:
    """The plans of `search.plan`, and those of one pipeline over all devices and the hosts behind them, best first.

    Arguments are those of `search.plan`. Asked for other widths than those of one pipeline, there are only plans without
    hosts, and why is among what is excluded.

    Raises:
        InputError: an input that cannot be used, or hosts that are not described.
        PlanError: nothing fits, with or without hosts.
    """
    job = job.with_state(reference)
    space, whole = space or Space.of(**within), with_hosts(cluster)
    options: dict[str, Any] = {"interruptible": interruptible, "keep": keep, "report": report}
    refused: PlanError | None = None
    try:
        found = plan(reference, cluster, job, space, **options)
    except PlanError as error:
        refused, found = error, Found([], [])
    if found.is_interrupted:
        return found
    searching = UntilCtrlC(interruptible, found.plans)
    mixed = Found([], [])
    try:
        with searching:
            over_all = _over_all(space, whole)
            mixed = plan(reference, whole, job, over_all, **options)
    except (PlanError, InputError) as error:
        if refused is not None:
            raise refused from None
        why = Excluded(f"with hosts: {error}", 1, whole.num_devices)
        return Found(found.plans, [*found.excluded, why], found.warnings)
    if searching.is_ended:
        return searching.told(found)
    excluded = [*found.excluded, *mixed.excluded]
    warnings = list(dict.fromkeys((*mixed.warnings, *found.warnings)))
    return Found(ranked([*found.plans, *mixed.plans]), excluded, warnings)


def _over_all(space: Space, whole: Cluster) -> Space:
    """One pipeline over all of `whole`; raises `InputError` where another is asked for."""
    for name, only in (("dp", 1), ("pp", whole.num_devices), ("tp", 1)):
        if getattr(space, name) not in (None, only):
            raise InputError(f"{name} = {getattr(space, name)} is asked for, and theirs is {only}")
    if space.host_optimizer == "always":
        raise InputError("an optimizer on the hosts is asked for, and hosts with stages have none")
    return replace(space, dp=1, pp=whole.num_devices, tp=1, host_optimizer="never")
