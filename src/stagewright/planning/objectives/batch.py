"""The largest batch that trains: microbatches as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.graph.flat_buffers import PARAMETERS
from stagewright.planning.found import Found, UntilCtrlC
from stagewright.planning.job import Job
from stagewright.planning.search import plan
from stagewright.planning.space import JOINT, SCHEDULES, Replicas, Sizes, Space, obstacle, replicas, widths
from stagewright.tracing.models.reference import ModelReference, resolve

_CLOSE = 16
"""Sizes are told apart to one part in this many."""


def largest_batch(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    space: Space | None = None,
    *,
    keep: int | None = None,
    report: Callable[[str], None] = lambda stage: None,
    interruptible: bool = False,
    **within: Any,
) -> Found:
    """The plans with the largest batch, best first: every sample of the job's `global_batch` becomes a microbatch, and
    microbatches grow until nothing fits, or Ctrl-C if the search is `interruptible` and there is a plan.

    Sizes double until nothing fits, then the last interval is halved down to a sixteenth of the size; where nothing else is
    asked for, with 1F1B and everything sharded, which take least. The plans of the size found are those of
    `stagewright.planning.search.plan`, whose arguments the others are; their jobs have the batch that was found.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        PlanError: not even microbatches of one sample fit.
    """
    reference = model if isinstance(model, ModelReference) else resolve(model)
    job = job.with_state(reference)
    space = (space or Space.of(**within)).of_runtime(job)
    if space.microbatch is not None:
        raise InputError(
            f"microbatch = {space.microbatch} is what the largest batch is searched by: leave it out"
        )
    # A faster order lets no batch grow.
    families = tuple(name for name in space.schedules or SCHEDULES if name != JOINT)
    names = ("1f1b",) if "1f1b" in families else families
    least = replace(
        space,
        schedules=names,
        chunks=space.chunks[:1],
        zero=space.zero or ((PARAMETERS,) if job.kept.is_elementwise else None),
    )
    tried: list[tuple[int, Sizes, Replicas, Found]] = []
    refused: PlanError | InputError | None = None

    def at(size: int, one: Sizes, left: Replicas, within: Space, keep: int | None) -> Found:
        grown = job.model_copy(update={"global_batch": job.global_batch * size})
        fixed = replace(within, dp=left.dp, pp=left.pp, tp=one.tp, cp=one.cp, ep=one.ep, microbatch=size)
        return plan(reference, cluster, grown, fixed, keep=keep, report=report)

    for one in widths(cluster, job, space):
        for left in replicas(one, cluster, job, space, cluster.num_devices):

            def fit(size: int, one: Sizes = one, left: Replicas = left) -> None:
                report(f"microbatches of {size} on dp {left.dp} x tp {one.tp} x pp {left.pp}")
                tried.append((size, one, left, at(size, one, left, least, keep=1)))

            searching = UntilCtrlC(interruptible, tried)
            try:
                with searching:
                    _grow(fit, max((size for size, *_ in tried), default=1))
            except PlanError as error:
                refused = refused or error
            except InputError as error:
                if space.tp is not None:
                    raise
                refused = refused or error
            if searching.is_ended:
                return searching.told(max(tried, key=_larger)[-1])
    if not tried:
        raise refused or InputError(obstacle(cluster, job, space))
    size, one, left, found = max(tried, key=_larger)
    if least == space:
        return found
    return at(size, one, left, replace(space, schedules=families), keep)


def _larger(tried: tuple[int, Sizes, Replicas, Found]) -> tuple[int, float]:
    """The largest size first; of as large ones the fastest."""
    size, _, _, found = tried
    return size, -found.plans[0].predictions.step_seconds


def _grow(fit: Callable[[int], None], first: int) -> None:
    """Calls `fit` with larger and larger sizes, up to the largest for which it does not raise `PlanError`.

    Raises:
        PlanError: `first` is too large.
    """
    fit(first)
    size, above = first, None
    while above is None or above - size > max(1, size // _CLOSE):
        middle = 2 * size if above is None else (size + above) // 2
        try:
            fit(middle)
            size = middle
        except PlanError:
            above = middle
