"""Plans in which the hosts' processors are ranks of the pipeline, with whole stages of their own."""

from __future__ import annotations

from typing import Any

from stagewright.cluster import Cluster, with_hosts
from stagewright.errors import InputError, PlanError
from stagewright.planning.found import Excluded, Found
from stagewright.planning.job import Job
from stagewright.planning.mixed import ONE_STAGE_EACH, plan_mixed
from stagewright.planning.ranking import ranked
from stagewright.planning.search import SCHEDULES, over_lengths, plan
from stagewright.tracing.models.reference import ModelReference

_KEPT = ("microbatch", "recompute", "offload", "report", "trace", "interruptible")
"""Options that mean the same where hosts take part."""


def plan_with_hosts(reference: ModelReference, cluster: Cluster, job: Job, **options: Any) -> Found:
    """The plans of `search.plan`, and those of one pipeline over all devices and the hosts behind them, best first.

    Options are those of `search.plan`; with hosts, only those that pipelines over several kinds of devices have.

    Raises:
        InputError: an input that cannot be used, or hosts that are not described.
        PlanError: nothing fits, with or without hosts.
    """
    whole = with_hosts(cluster)
    refused: PlanError | None = None
    try:
        found = plan(reference, cluster, job, **options)
    except PlanError as error:
        refused, found = error, Found([], [])
    if found.is_interrupted:
        return found
    schedules = [name for name in options.get("schedules", SCHEDULES) if name in ONE_STAGE_EACH]
    kept = {name: options[name] for name in _KEPT if name in options}
    try:
        mixed = plan_mixed(
            reference, whole, job, schedules=schedules or ["1f1b"], dp=1, pp=whole.num_devices, **kept
        )
        heard = {name: value for name, value in kept.items() if name in ("report", "trace")}
        mixed = over_lengths(mixed, whole, **heard)
    except KeyboardInterrupt:
        if not (options.get("interruptible") and found.plans):
            raise
        return found.interrupted()
    except (PlanError, InputError) as error:
        if refused is not None:
            raise refused from None
        excluded = Excluded(f"with hosts: {error}", 1, whole.num_devices)
        return Found(found.plans, [*found.excluded, excluded], found.warnings)
    return Found(ranked([*found.plans, *mixed.plans]), found.excluded, [*mixed.warnings, *found.warnings])
