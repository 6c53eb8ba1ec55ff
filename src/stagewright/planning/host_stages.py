"""Plans in which the hosts' processors are ranks of the pipeline, with whole stages of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.cluster import Cluster, with_hosts
from stagewright.errors import InputError, PlanError
from stagewright.planning.found import Excluded, Found, UntilCtrlC
from stagewright.planning.job import Job
from stagewright.planning.mixed import check_mixed, plan_mixed, simple_schedules
from stagewright.planning.ranking import ranked
from stagewright.planning.search import SCHEDULES, over_lengths, plan
from stagewright.tracing.models.reference import ModelReference

_KEPT = ("microbatch", "recompute", "offload", "loss_pieces", "report", "trace", "interruptible")
"""Options that mean the same where hosts take part."""


def plan_with_hosts(reference: ModelReference, cluster: Cluster, job: Job, **options: Any) -> Found:
    """The plans of `search.plan`, and those of one pipeline over all devices and the hosts behind them, best first.

    Options are those of `search.plan`. Asked for what pipelines over several kinds of devices do not have, or for another
    width, there are only plans without hosts, and why is among what is excluded.

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
    searching = UntilCtrlC(options.get("interruptible", False), found.plans)
    mixed = Found([], [])
    try:
        with searching:
            mixed = _over_all(reference, whole, job, options)
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


def _over_all(reference: ModelReference, whole: Cluster, job: Job, options: Mapping[str, Any]) -> Found:
    """The plans of one pipeline over all of `whole`; raises `InputError` and `PlanError`."""
    _check(whole, options)
    schedules = simple_schedules(whole, options.get("schedules", SCHEDULES))
    kept = {name: options[name] for name in _KEPT if name in options}
    found = plan_mixed(reference, whole, job, schedules=schedules, dp=1, pp=whole.num_devices, **kept)
    heard = {name: value for name, value in kept.items() if name in ("report", "trace")}
    return over_lengths(found, whole, **heard)


def _check(whole: Cluster, options: Mapping[str, Any]) -> None:
    """Raises `InputError` for widths, and whatever else is asked for, that a pipeline over all of `whole` does not have."""
    for name, only in (("dp", 1), ("pp", whole.num_devices)):
        if options.get(name) not in (None, only):
            raise InputError(f"{name} = {options[name]} is asked for, and theirs is {only}")
    if options.get("host_optimizer") == "always":
        raise InputError("an optimizer on the hosts is asked for, and hosts with stages have none")
    names = "tp", "zero", "reduce_dtype", "shard_size"
    check_mixed(whole, **{name: options.get(name) for name in names})
