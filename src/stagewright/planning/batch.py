"""The largest batch that trains: microbatches as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.finalists import JOINT
from stagewright.planning.job import Job
from stagewright.planning.search import SCHEDULES, Found, plan
from stagewright.planning.widths import tensor_widths_of, widths_of
from stagewright.tracing.models.reference import ModelReference

_CLOSE = 16
"""Sizes are told apart to one part in this many."""


def largest_batch(
    model: str | ModelReference,
    cluster: Cluster,
    job: Job,
    *,
    report: Callable[[str], None] = lambda stage: None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = 1,
    microbatch: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    **options: Any,
) -> Found:
    """The plans with the largest batch, best first: every sample of the job's `global_batch` becomes a microbatch, and
    microbatches grow until nothing fits.

    Sizes double until nothing fits, then the last interval is halved down to a sixteenth of the size. Other arguments are
    those of `stagewright.planning.search.plan`, whose plans these are; their jobs have the batch that was found.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        PlanError: not even microbatches of one sample fit.
    """
    if microbatch is not None:
        raise InputError(f"microbatch = {microbatch} is what the largest batch is searched by: leave it out")
    options["schedules"] = [name for name in schedules if name != JOINT]  # a faster order lets no batch grow
    best: tuple[int, Found] | None = None
    refused: PlanError | InputError | None = None
    for dp_width, pp_width, tp_width in _widths(cluster, job, pp, dp, tp):

        def fits(size: int, dp: int = dp_width, pp: int = pp_width, tp: int = tp_width) -> Found:
            report(f"microbatches of {size} on dp {dp} x tp {tp} x pp {pp}")
            grown = job.model_copy(update={"global_batch": job.global_batch * size})
            return plan(model, cluster, grown, report=report, pp=pp, dp=dp, tp=tp, microbatch=size, **options)

        try:
            size, found = _largest(fits, best[0] if best is not None else 1)
        except PlanError as error:
            refused = refused or error
            continue
        except InputError as error:
            if tp is not None:
                raise
            refused = refused or error
            continue
        if best is None or _better(size, found, best):
            best = size, found
    if best is None:
        assert refused is not None
        raise refused
    return best[1]


def _widths(
    cluster: Cluster, job: Job, pp: int | None, dp: int | None, tp: int | None
) -> list[tuple[int, int, int]]:
    """All (dp, pp, tp) that may be tried."""
    return [
        (*width, shared)
        for shared in tensor_widths_of(cluster, tp)
        for width in widths_of(cluster, job, pp, dp, shared)
    ]


def _better(size: int, found: Found, best: tuple[int, Found]) -> bool:
    """Larger, or as large and faster."""
    seconds = [one.plans[0].predictions.step_seconds for one in (found, best[1])]
    return size > best[0] or (size == best[0] and seconds[0] < seconds[1])


def _largest(fits: Callable[[int], Found], first: int) -> tuple[int, Found]:
    """The largest size, from `first` on, for which `fits` returns plans; raises its error if `first` is too large."""
    size, found = first, fits(first)
    above = None
    while above is None or above - size > max(1, size // _CLOSE):
        middle = 2 * size if above is None else (size + above) // 2
        try:
            size, found = middle, fits(middle)
        except PlanError:
            above = middle
    return size, found
