"""The largest batch that trains: microbatches as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.finalists import JOINT
from stagewright.planning.found import Found, UntilCtrlC
from stagewright.planning.job import Job
from stagewright.planning.search import SCHEDULES, plan
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
    interruptible: bool = False,
    **options: Any,
) -> Found:
    """The plans with the largest batch, best first: every sample of the job's `global_batch` becomes a microbatch, and
    microbatches grow until nothing fits, or Ctrl-C if the search is `interruptible` and there is a plan.

    Sizes double until nothing fits, then the last interval is halved down to a sixteenth of the size. Other arguments are
    those of `stagewright.planning.search.plan`, whose plans these are; their jobs have the batch that was found.

    Raises:
        InputError: the model, device or a width cannot be used as given.
        PlanError: not even microbatches of one sample fit.
    """
    if microbatch is not None:
        raise InputError(f"microbatch = {microbatch} is what the largest batch is searched by: leave it out")
    options["schedules"] = [name for name in schedules if name != JOINT]  # a faster order lets no batch grow
    tried: list[tuple[int, Found]] = []
    refused: PlanError | InputError | None = None
    for dp_width, pp_width, tp_width in _widths(cluster, job, pp, dp, tp):

        def fit(size: int, dp: int = dp_width, pp: int = pp_width, tp: int = tp_width) -> None:
            report(f"microbatches of {size} on dp {dp} x tp {tp} x pp {pp}")
            grown = job.model_copy(update={"global_batch": job.global_batch * size})
            found = plan(
                model, cluster, grown, report=report, pp=pp, dp=dp, tp=tp, microbatch=size, **options
            )
            tried.append((size, found))

        searching = UntilCtrlC(interruptible, tried)
        try:
            with searching:
                _grow(fit, max((size for size, _ in tried), default=1))
        except PlanError as error:
            refused = refused or error
        except InputError as error:
            if tp is not None:
                raise
            refused = refused or error
        if searching.is_ended:
            return searching.told(_best(tried))
    if not tried:
        assert refused is not None
        raise refused
    return _best(tried)


def _widths(
    cluster: Cluster, job: Job, pp: int | None, dp: int | None, tp: int | None
) -> list[tuple[int, int, int]]:
    """All (dp, pp, tp) that may be tried; ranks share layers only where the other widths leave any to."""
    found: list[tuple[int, int, int]] = []
    for shared in tensor_widths_of(cluster, tp):
        try:
            found += [(*width, shared) for width in widths_of(cluster, job, pp, dp, shared)]
        except InputError:
            if tp is not None or shared == 1:
                raise
    return found


def _best(tried: Sequence[tuple[int, Found]]) -> Found:
    """The plans of the largest size; of as large ones the fastest."""
    return max(tried, key=lambda one: (one[0], -one[1].plans[0].predictions.step_seconds))[1]


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
