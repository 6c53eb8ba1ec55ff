"""Improving on the best plans of a search: loss pieces, whole sequences, recomputation, and the joint search."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import itemgetter

from stagewright.errors import InputError, TraceError
from stagewright.machine import at_once
from stagewright.planning.best_first import Search
from stagewright.planning.configuration import Configuration
from stagewright.planning.fitters import OperatorFitter
from stagewright.planning.joint.top_configurations import NUM_SEARCHED, busy_seconds, joint_plans
from stagewright.planning.loss_pieces import PIECE_TOKENS
from stagewright.planning.memory.fitting import Fit
from stagewright.planning.plan import Plan
from stagewright.planning.ranking import AS_FAST, ranked
from stagewright.planning.search_result import Excluded
from stagewright.planning.space import JOINT

_REFINED = 250
"""Maximum operators of a stage for a longer search for what it recomputes: with more, that takes long and gains nothing."""

_WORTH_REFINING = 0.02
"""Share of its busy time that a plan must spend on recomputing and waiting for the host to be improved by other choices."""

_SLACK = 0.02
"""Share of a device's memory that the best plan must leave unused for it to be worked out again with less headroom."""
_PARTS = 1.0, 0.5
"""Parts of what is unused by which the headroom is reduced, until a plan fits."""

_SIMPLER_TRIES = 2
"""Number of configurations without a pipeline that are tried where the best plan has one."""


def improve(search: Search) -> None:
    """Add plans close to the best ones of a search under our own runtime that are faster, or simpler and about as fast.

    Raises:
        KeyboardInterrupt: Ctrl-C; the plans made until then are added.
    """
    fitter = search.fitter
    assert isinstance(fitter, OperatorFitter)
    _try_pieces(search)
    _try_whole_sequences(search)
    if not search.fits:
        if search.request.below_s < math.inf:
            return
        search.report("recomputing and offloading more")
        last = fitter.last_resort()
        if last is None:
            return
        search.add(last)
        _try_pieces(search)
        if len(search.fits) == 1:
            return
    _refine(search, fitter)
    if JOINT in (search.space.schedules or ()):
        _search_jointly(search, _slower_pipelines(search, fitter))
    _fit_without_pipeline(search, fitter)


def _try_pieces(search: Search) -> None:
    """Retry, with the loss in pieces, configurations that may fit or be faster if logits take less memory."""
    divided = set[tuple[int, int]]()  # tensor parallel degrees and microbatch sizes whose loss was in pieces
    for tokens in PIECE_TOKENS if search.space.loss_pieces == "auto" else ():
        has_plans, shapes = bool(search.fits), search.short_of_memory()
        search.piece_tokens = tokens
        for shape in shapes:
            if has_plans and (shape.tp, shape.microbatch_size) in divided:
                continue
            keys = search.graphs_of(shape)
            if any(search.with_pieces(key).loss_pieces > 1 for key in keys):
                divided.add((shape.tp, shape.microbatch_size))
            _try_graphs(search, keys, set(shape.degrees))


def _try_whole_sequences(search: Search) -> None:
    """Retry the degrees of the best plan without sequence parallelism, if it has that."""
    best, whole = search.best, search.whole_sequences
    if best is not None and whole is not None:
        if whole.loss_pieces == 1:
            search.piece_tokens = 0
        _try_graphs(search, [whole], {(best.plan.dp, best.plan.pp)})


def _try_graphs(search: Search, keys: Iterable[Configuration], degrees: set[tuple[int, int]]) -> None:
    """Evaluate the configurations of further graphs whose (dp, pp) is one of `degrees`."""
    for key in dict.fromkeys(keys):
        if search.with_pieces(key) not in search.coarse.graphs:
            try:
                search.gather_sizes(key, [key.microbatch], strictly=True)
            except (InputError, TraceError) as error:
                search.fitter.excluded.append(Excluded(str(error), 1, 1, key.microbatch, tp=key.tp))
    search.waiting.keep(lambda entry: (entry.configuration.dp, entry.configuration.pp) in degrees)
    search.work_out()


def _to_refine(search: Search) -> list[Fit]:
    """Return the fastest fit, the one that ranks first, and the best-ranked with all state on devices, so that these are
    compared after all are refined."""
    plans = ranked(fit.plan for fit in search.fits)
    on_devices = (plan for plan in plans if not plan.host_optimizer and not plan.streamed)
    fastest = [] if search.best is None else [search.best.plan]
    chosen = [*fastest, *plans[:1], *itertools.islice(on_devices, 1)]
    return [fit for fit in search.fits if any(fit.plan is plan for plan in chosen)]


def _refine(search: Search, fitter: OperatorFitter) -> None:
    """Replace the best plans by faster ones with the same cuts that recompute, offload or leave free other amounts, where
    recomputing and waiting for the host cost them much."""
    worth_it = [
        fit
        for fit in _to_refine(search)
        if fit.entry.configuration.saves and _saving_share(fit.plan) >= _WORTH_REFINING
    ]
    if worth_it:
        search.report("looking for what is best recomputed")
    attempts = [list(_refinements(search, fitter, fit)) for fit in worth_it]
    with closing(at_once(list(itertools.chain.from_iterable(attempts)))) as results:
        for fit, attempts_at_it in zip(worth_it, attempts, strict=True):
            refined = itertools.islice(results, len(attempts_at_it))
            fastest = min((fit, *filter(None, refined)), key=lambda fit: fit.step_seconds)
            if fastest is not fit:
                search.fits.remove(fit)
                search.add(replace(fastest, entry=fit.entry))


def _refinements(search: Search, fitter: OperatorFitter, best: Fit) -> Iterator[Callable[[], Fit | None]]:
    """Yield functions that may return a faster plan than `best` with its cuts."""
    yield partial(_with_other_memory, search, fitter, best)
    if _may_be_refined(best.plan):
        yield partial(fitter.refined, best.entry)


def _with_other_memory(search: Search, fitter: OperatorFitter, best: Fit) -> Fit | None:
    """Return a plan that is faster than `best` because it leaves less headroom, where much of that is unused, or because it
    offloads; None if neither is."""
    offloads = best.entry.configuration.offload
    fastest = best
    unused = _unused_share(best.plan, search.usable_bytes)
    for part in _PARTS if best.headroom and unused > _SLACK else ():
        smaller = max(0, best.headroom - int(part * unused * search.usable_bytes))
        fit = fitter.afresh(best, best.step_seconds, offload=offloads, headroom=smaller)
        if fit is not None:
            fastest = fit
            break
    if search.space.offload and not offloads and search.cluster.kind != "cpu":
        fit = fitter.afresh(best, fastest.step_seconds, offload=True, headroom=fastest.headroom)
        fastest = fit or fastest
    return None if fastest is best else fastest


def _saving_share(plan: Plan) -> float:
    """Return the share of their busy time that stages spend on recomputing and on waiting for the host."""
    stages = plan.predictions.stages
    saving_s = sum(stage.recompute_seconds + stage.waiting_seconds for stage in stages)
    busy_s = sum(
        stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds for stage in stages
    )
    return saving_s / busy_s


def _unused_share(plan: Plan, usable_bytes: int) -> float:
    """Return the share of memory that the fullest rank does not reserve: headroom that fragmentation does not need."""
    return 1 - plan.predictions.reserved_peak_bytes / usable_bytes


def _may_be_refined(plan: Plan) -> bool:
    """Return whether a stage that recomputes is small enough for a longer search."""
    return any(
        stage.recompute_seconds and stage.stop - stage.start <= _REFINED for stage in plan.predictions.stages
    )


def _search_jointly(search: Search, slower: Sequence[Fit]) -> None:
    """Add plans of the joint search that are faster than the best of the built schedules; `slower` are pipelines that it may
    make faster, too."""
    stop = threading.Event()
    plans = joint_plans(search.fits, slower, search.coarse, search.space, stop, search.wait_for_kernels)
    for fit in plans:
        search.fits.append(fit)
    if stop.is_set():
        raise KeyboardInterrupt


def _fit_without_pipeline(search: Search, fitter: OperatorFitter) -> None:
    """Add a plan without a pipeline if the best has one and is hardly faster: of the two, the simpler one ranks first."""
    best = search.best
    if best is None or best.plan.pp == 1 or any(fit.plan.pp == 1 for fit in search.fits):
        return
    longest_s = (1 + AS_FAST) * best.step_seconds
    for bound_s, entry in sorted(search.without_pipeline, key=itemgetter(0))[:_SIMPLER_TRIES]:
        split = (bound_s, entry) if entry.is_split else fitter.split(entry)
        if split is None or max(bound_s, split[0]) >= longest_s:
            continue
        if (fit := fitter.fit(split[1], math.inf, longest_s)) is not None:
            search.add(fit)
            return


def _slower_pipelines(search: Search, fitter: OperatorFitter) -> list[Fit]:
    """Return plans, whether or not they fit, that keep everything in pipelines that were left out as too slow and that the
    joint search may make faster than the best by filling bubbles; at most as many as it lacks."""
    slower: list[Fit] = []
    if (best := search.best) is None:
        return slower
    shapes = {fit.entry.shape for fit in search.fits}
    least_s: dict[Configuration, float] = {}
    for entry in search.slower:
        busy_s = fitter.with_network(entry, entry.busy_s)
        least_s[entry.shape] = min(least_s.get(entry.shape, math.inf), busy_s)
    num_wanted = NUM_SEARCHED - len({fit.entry.shape for fit in search.fits if fit.plan.pp > 1})
    for entry in search.slower:
        if len(slower) >= num_wanted:
            break
        if entry.shape in shapes or least_s[entry.shape] >= best.step_seconds:
            continue
        shapes.add(entry.shape)
        pipeline = fitter.keeping_all(entry)
        if busy_seconds(pipeline.plan) + fitter.saving_s(entry) < best.step_seconds:
            slower.append(pipeline)
    return slower
