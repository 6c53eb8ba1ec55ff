"""What another search would find if there were more of something: memory, links, samples a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.cluster import Cluster
from stagewright.cluster.other_links import with_faster_links
from stagewright.errors import PlanError
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan as search
from stagewright.units import GIB

_MORE_BYTES = GIB
_FASTER = 2.0


@dataclass(frozen=True)
class Searched:
    """The best plan where something is otherwise, by the time that the samples of a step of the plan take."""

    what: str
    seconds: float | None
    """None where nothing was found."""
    configuration: str


def searched(plan: Plan, report: Callable[[str], None] = lambda stage: None) -> tuple[Searched, ...]:
    """The best for the model, cluster and job of `plan` as they are, and with one thing otherwise each time.

    Nothing is asked of widths and schedules: the first line says what that alone is worth.

    Raises:
        InputError: the model cannot be resolved, or has changed.
        TraceError: the model cannot be traced.
    """
    cluster, job = plan.cluster.load(), plan.job
    usable = min(job.usable_bytes(group.device, cluster) for group in cluster.nodes)
    cases: list[tuple[str, Cluster, Job]] = [
        ("as it is", cluster, job),
        ("1 GiB more memory on every device", cluster, job.model_copy(update={"memory_limit": usable + _MORE_BYTES})),
        ("links twice as fast", with_faster_links(cluster, _FASTER), job),
        ("twice the samples a step", cluster, job.model_copy(update={"global_batch": 2 * job.global_batch})),
    ]  # fmt: skip
    found = []
    for number, (what, on, asked) in enumerate(cases):
        report(f"search {number + 1} of {len(cases)}: {what}")
        found.append(_best(plan, what, on, asked))
    return tuple(found)


def _best(plan: Plan, what: str, cluster: Cluster, job: Job) -> Searched:
    try:
        best = search(plan.model.resolved(), cluster, job, keep=1, reduce_dtype=plan.reduce_dtype).plans[0]
    except PlanError:
        return Searched(what, None, "nothing fits")
    per_sample = best.mean_step_seconds / job.global_batch
    text = repr(best).partition(": ")[2].rpartition(", ")[0]
    return Searched(what, per_sample * plan.job.global_batch, text)
