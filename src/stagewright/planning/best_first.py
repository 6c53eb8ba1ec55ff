"""Best-first search: bound all configurations, partition and fit the most promising, and judge them by predictions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from operator import itemgetter
from typing import Any, NoReturn, Self

from stagewright.cluster import Cluster
from stagewright.errors import ContractError, InputError, StagewrightError, TraceError
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.graph.graph import short_name
from stagewright.planning.arranging import on_devices_of
from stagewright.planning.assignment.device_order import orders, usable_bytes_of_ranks
from stagewright.planning.bounds.coarse import Coarse, Trace
from stagewright.planning.configuration import Configuration
from stagewright.planning.fitters import OperatorFitter, fitter_of
from stagewright.planning.job import Job
from stagewright.planning.joint.compiling import compiled_meanwhile
from stagewright.planning.joint.top_configurations import MOST_FILLED
from stagewright.planning.loss_pieces import (
    PIECE_TOKENS,
    Shape,
    logits_bytes,
    pieces_by_share,
    pieces_of_tokens,
    short_of_memory,
)
from stagewright.planning.memory.fitting import Entry, Fit
from stagewright.planning.ranking import ranked
from stagewright.planning.search_result import LARGER, Excluded, NextBest, SearchResult, operator_warnings
from stagewright.planning.space import (
    JOINT,
    Space,
    configurations,
    microbatch_sizes,
    most_stages,
    obstacle,
    parallel_degrees,
    streamed_obstacle,
)
from stagewright.tracing.ahead import Ahead
from stagewright.tracing.cache import to_trace
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_seconds

KEPT = 5
"""Maximum number of plans that a search returns unless asked for more."""

_FIRST_TRIES, _FIRST_TRIES_OF_GRAPH = 6, 2
"""Maximum number of preliminary fits before all graphs are traced: in total, and after each of the graphs."""

_TO_SPARE = 0.15
"""Share of memory that a configuration must have to spare for a preliminary fit, by a bound that leaves out much."""

_POOR = 2.0
"""A preliminary plan that takes more than this many times the least lower bound is not good enough: another is tried."""

_NEAR = 0.05
"""Bounds of microbatch sizes that differ by less than this share do not say which is better."""

_READY = 3
"""Number of further entries that are made ready before each fit, in at most `_STEPS` steps."""
_STEPS = 60
_LIKELY = 12
"""Maximum number of graphs, the most likely to be needed, that other processes are offered at a time."""
_SURE = 6
"""Number of the most promising graphs that come before those with the loss in pieces."""
_HOPEFUL = 1.25
"""Other processes trace only graphs whose bound is below this many times the least bound."""


@dataclass(frozen=True)
class Request:
    """A request for plans: model, cluster, job and search space."""

    model: ModelReference
    cluster: Cluster
    job: Job
    space: Space
    keep: int | None = None
    below_s: float = math.inf
    """Plans whose steps take this long or longer are of no use."""


@dataclass(frozen=True)
class _Untraced:
    """Parallel degrees not traced yet; `bound_s` is a lower bound from the graph of the smaller degrees `narrower`."""

    bound_s: float
    degrees: Configuration
    microbatch_sizes: Sequence[int]
    narrower: Configuration


class _Queue:
    """A priority queue of entries by a lower bound on their seconds; equal bounds keep their order of arrival."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Entry]] = []
        self.numbers = count()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for _, _, entry in self.entries)

    @property
    def least_s(self) -> float:
        return self.entries[0][0] if self.entries else math.inf

    def partitioned(self, below_s: float) -> Iterator[Entry]:
        """Yield the partitioned entries with bounds below `below_s`, the most promising first."""
        for bound_s, _, entry in sorted(self.entries, key=itemgetter(0, 1)):
            if entry.is_split and bound_s < below_s:
                yield entry

    def push(self, bound_s: float, entry: Entry) -> None:
        heapq.heappush(self.entries, (bound_s, next(self.numbers), entry))

    def keep(self, is_wanted: Callable[[Entry], bool]) -> None:
        """Drop all entries but those that `is_wanted`."""
        self.entries = [item for item in self.entries if is_wanted(item[2])]
        heapq.heapify(self.entries)

    def pop(self) -> tuple[float, int, Entry]:
        """Return the most promising entry after its bound and number, and remove it."""
        return heapq.heappop(self.entries)

    def put_back(self, items: Iterable[tuple[float, int, Entry]]) -> None:
        for item in items:
            heapq.heappush(self.entries, item)


@dataclass
class Search:
    """A search in progress; its `fitter` bounds, partitions and fits configurations."""

    request: Request
    report: Callable[[str], None]
    trace: Trace
    fits: list[Fit] = field(default_factory=list)
    waiting: _Queue = field(default_factory=_Queue)
    untraced: list[_Untraced] = field(default_factory=list)
    refused: list[StagewrightError] = field(default_factory=list)
    num_bounded: int = 0
    """Number of configurations left out because their lower bounds are too high."""
    next_best: NextBest | None = None
    """The most promising of these."""
    slower: list[Entry] = field(default_factory=list)
    """Partitioned pipelines whose bound is slightly above the best plan, the most promising first."""
    without_pipeline: list[tuple[float, Entry]] = field(default_factory=list)
    """Configurations without a pipeline whose bound is slightly above the best plan, with that bound."""
    piece_tokens: int = 0
    """Tokens per loss piece from now on; 0: as `pieces_by_share` returns."""
    has_pieces: bool = True
    """Whether the loss of the model can be evaluated in pieces; False once a trace with pieces has failed."""
    fitted_s: float = math.inf
    """Lower bound of the entry that is being fitted."""
    shows_first: bool = False
    """Whether to make preliminary plans, for somebody who watches or may end the search early."""
    preliminary: list[Fit] = field(default_factory=list)
    """Plans from the first graphs, shown or returned as long as there are no others; the search does not depend on them."""
    _tried_first: set[Configuration] = field(default_factory=set)
    """Configurations for which a preliminary fit was tried."""
    is_gathered: bool = False
    """Whether all degrees have a bound."""
    _first_fits: dict[Configuration, tuple[int, float]] = field(default_factory=dict)
    """Loss pieces and step seconds of the first plan, by its configuration with the loss in one piece and without
    offloading."""

    wait_for_kernels: Callable[[], object] = lambda: None
    """Waits for the process that compiles the kernels of the joint search, if there is one."""
    _not_missing: set[Configuration] = field(default_factory=set)
    """Keys of graphs that were in the cache, or followed from others in it, when last looked up."""
    _ahead: Ahead | None = None
    """Processes that trace graphs likely to be needed; None where graphs are not cached."""
    _processes: ExitStack = field(default_factory=ExitStack)
    """Processes that trace or fit ahead, until the search is closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.close()

    def __post_init__(self) -> None:
        request, report = self.request, self.report
        self.report = lambda text: report(self._so_far() + text)
        self.cluster, self.job, self.space = request.cluster, request.job, request.space
        self.is_own = request.job.runtime == STAGEWRIGHT
        self.coarse = Coarse(request.model, request.cluster, request.job, self.report, self.trace)
        self.fitter = fitter_of(self.coarse, self.space)
        if isinstance(self.fitter, OperatorFitter):
            self._processes.callback(self.fitter.ahead.close)
            is_joint = JOINT in (self.space.schedules or ()) and self.space.is_improved
            if is_joint and self.cluster.num_devices > 1 and self.space.pp != 1:
                self.wait_for_kernels = self._processes.enter_context(compiled_meanwhile())
        (self.usable_bytes,) = usable_bytes_of_ranks(self.job, self.cluster, 1)

    # -- bound -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Bound all degrees: trace the smallest microbatch of those that no smaller degrees bound and queue their
        configurations; keep the others as `untraced`, unless nothing else is left to queue."""
        space = self.space
        sizes_of = {
            degrees: sizes
            for degrees in parallel_degrees(self.cluster, self.job, space)
            if (sizes := microbatch_sizes(degrees, self.cluster, self.job, space))
        }
        if not sizes_of:
            raise InputError(obstacle(self.cluster, self.job, space))  # for any model
        has_experts = space.ep is not None or self.request.model.names_experts

        def unbounded() -> list[Configuration]:
            return self._unbounded(degrees for degrees in sizes_of if degrees.ep == 1 or has_experts)

        def arguments(keys: Iterable[Configuration]) -> list[dict[str, Any]]:
            return [self._arguments(degrees, sizes_of[degrees]) for degrees in keys]

        remaining = unbounded()
        ahead = Ahead(self.request.model, self._all_arguments(sizes_of), self.report)
        self._processes.enter_context(ahead)
        if self._are_graphs_cached():
            ahead.start(arguments(remaining[1:]), arguments(remaining[:1]))
            self._ahead = ahead
        for degrees, sizes in sizes_of.items():
            if degrees.ep > 1 and not has_experts:
                continue
            if (narrower := self.coarse.narrower(degrees)) is not None:
                bound_s = self.coarse.wider_s(degrees, narrower)
                self.untraced.append(_Untraced(bound_s, degrees, sizes, narrower))
                continue
            is_first = not self.coarse.graphs
            remaining = [other for other in remaining if other != degrees]
            if not is_first and self._ahead is not None:
                ahead.bring(arguments([degrees, *remaining]))
            self._gather_degrees(degrees, sizes)
            if is_first and self.coarse.graphs:
                graph = next(iter(self.coarse.graphs.values()))
                has_experts = space.ep is not None or any(
                    short_name(node.op) == "permute_rows" for node in graph
                )
                remaining = [other for other in unbounded() if other != degrees]
                if not self._are_graphs_cached():
                    self._ahead = None
            if self._ahead is not None:
                ahead.share(arguments(remaining))
                self._trace_ahead([])
            self._fit_first()
        self.untraced.sort(key=lambda untraced: untraced.bound_s)
        while self.untraced and not self.waiting:
            self._gather_untraced()
        if not self.waiting:
            self._refuse_nothing_to_try()
        self.is_gathered = True

    def _all_arguments(self, sizes_of: Mapping[Configuration, Sequence[int]]) -> list[dict[str, Any]]:
        """Return the arguments of the tracer for all degrees, with the loss in any number of pieces that may be tried."""
        keys = dict[Configuration, None]()
        for degrees, sizes in sizes_of.items():
            for size in sizes:
                key = replace(degrees, microbatch=size)
                keys |= dict.fromkeys(
                    self.with_pieces(key, tokens) for tokens in (self.piece_tokens, *PIECE_TOKENS)
                )
        return list(map(self.coarse.trace_arguments, keys))

    def _trace_ahead(self, own: Sequence[Mapping[str, Any]]) -> None:
        """Let other processes trace what is likely to be needed next, while this one traces `own` graphs or fits."""
        if self._ahead is None or not self._ahead.has_room:
            return
        likely = list(islice(self._likely_traced(), _LIKELY))
        missing = [key for key in likely if key not in self._not_missing]
        if missing and not self._ahead.start(list(map(self.coarse.trace_arguments, missing)), own):
            self._not_missing.update(missing)

    def _likely_traced(self) -> Iterator[Configuration]:
        """Yield keys of graphs that may be needed, the most likely first: of configurations that may be faster than the
        plans so far, and of these plans with the loss in pieces or without sequence parallelism."""
        yielded = set(self.coarse.graphs)

        def not_yielded(keys: Iterable[Configuration]) -> Iterator[Configuration]:
            for key in keys:
                if key not in yielded:
                    yielded.add(key)
                    yield key

        may_be_fast = map(self.with_pieces, self._untraced_by_bound())
        yield from not_yielded(islice(may_be_fast, _SURE))
        for shape in self.short_of_memory() if self.fits and self.space.loss_pieces == "auto" else ():
            yield from not_yielded(self.with_pieces(key, PIECE_TOKENS[0]) for key in self.graphs_of(shape))
        if (whole := self.whole_sequences) is not None:
            yield from not_yielded([whole])
        yield from not_yielded(may_be_fast)

    def _untraced_by_bound(self) -> Iterator[Configuration]:
        """Yield keys of graphs not traced yet, the lowest bound first, whose bounds are near the least and low enough for a
        useful plan."""
        untraced = [
            (other.bound_s, replace(other.degrees, microbatch=other.microbatch_sizes[0]))
            for other in self.untraced
        ]
        bounded = [
            (bound_s, entry.configuration)
            for bound_s, _, entry in self.waiting.entries
            if entry.bounded_by is not None
        ]
        least_s = min((self.waiting.least_s, *(bound_s for bound_s, _ in untraced)))
        most_s = min(self.longest_s, _HOPEFUL * least_s)
        for bound_s, configuration in sorted((*untraced, *bounded), key=itemgetter(0)):
            if bound_s >= most_s:
                return
            yield configuration.traced

    def _arguments(self, degrees: Configuration, microbatch_sizes: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of the tracer for degrees and the first of the microbatch sizes."""
        return self.coarse.trace_arguments(self.with_pieces(replace(degrees, microbatch=microbatch_sizes[0])))

    def _refuse_nothing_to_try(self) -> NoReturn:
        """Raise the reason why there is no configuration to try."""
        if self.refused:
            raise self.refused[0]
        most = 0
        if self.coarse.graphs:
            num_layers = self.coarse.costs(next(iter(self.coarse.graphs))).num_layers
            most = most_stages(num_layers, self.cluster, self.job)
            if self.space.streamed == "always":
                raise InputError(streamed_obstacle(num_layers))
        raise InputError(obstacle(self.cluster, self.job, self.space, most))

    def _gather_degrees(self, degrees: Configuration, sizes: Sequence[int]) -> None:
        """Queue the configurations as `gather_sizes`; where the model does not support the degrees, note the reason."""
        try:
            self.gather_sizes(degrees, sizes)
        except (InputError, TraceError, ContractError) as error:
            self.refused.append(error)
            self.fitter.excluded.append(Excluded(str(error), 1, 1, tp=degrees.tp))

    def _gather_untraced(self) -> None:
        """Trace the most promising of the untraced degrees, queue their configurations, and bound others by their graph."""
        first = self.untraced.pop(0)
        self._trace_ahead([self._arguments(first.degrees, first.microbatch_sizes)])
        self._gather_degrees(first.degrees, first.microbatch_sizes)
        traced = self.with_pieces(replace(first.degrees, microbatch=first.microbatch_sizes[0]))
        for place, other in enumerate(self.untraced):
            if self.coarse.narrower(other.degrees) == traced:
                bound_s = max(other.bound_s, self.coarse.wider_s(other.degrees, traced))
                self.untraced[place] = replace(other, bound_s=bound_s, narrower=traced)
        self.untraced.sort(key=lambda untraced: untraced.bound_s)

    def gather_sizes(self, degrees: Configuration, sizes: Sequence[int], *, strictly: bool = False) -> None:
        """Queue all configurations of these degrees, each with the smallest microbatch first; raises what the tracer raises.

        Unless `strictly`, our own runtime drops loss pieces or sequence parallelism where the model cannot be traced with
        them and the request does not fix them.
        """
        keys = [self.with_pieces(replace(degrees, microbatch=size)) for size in sizes]
        self.report(f"degrees {keys[0]}")
        try:
            num_layers = self.coarse.costs(keys[0]).num_layers
            graph = self.coarse.graph(keys[0])
            by_kind: dict[Configuration, list[Configuration]] = {}
            for key in keys:
                for configuration in configurations(
                    key, graph, num_layers, self.cluster, self.job, self.space
                ):
                    kind = replace(configuration, microbatch=0, num_microbatches=0, loss_pieces=1)
                    by_kind.setdefault(kind, []).append(configuration)
        except (InputError, TraceError):
            if strictly or not self.is_own:
                raise
            if self._goes_without_pieces(keys[0]):
                self.gather_sizes(degrees, sizes)
            elif degrees.sequence_parallel and self.space.sequence_parallel is None:
                self.gather_sizes(replace(degrees, sequence_parallel=False), sizes)
            else:
                raise
            return
        for smallest, *larger in by_kind.values():
            bounded_by = None if smallest.traced == keys[0] else keys[0]
            for cluster in self._orders:
                self._queue(Entry(smallest, cluster, tuple(larger), bounded_by=bounded_by))

    def _queue(self, entry: Entry) -> None:
        """Queue an entry with the least bound of all its microbatch sizes; `entry.compute_s` is a lower bound for each.

        Where the bound of larger microbatches is much lower, they get an entry of their own, which comes first.
        """
        bound_s = self.fitter.bound_s(entry)
        grown, larger_s = entry, math.inf
        while grown.larger:
            grown = replace(grown.grown(), compute_s=entry.compute_s)
            larger_s = min(larger_s, self.fitter.bound_s(grown))
        if larger_s * (1 + _NEAR) < bound_s:
            self.waiting.push(bound_s, replace(entry, larger=()))
            self._queue(replace(entry.grown(), compute_s=entry.compute_s))
        else:
            self.waiting.push(min(bound_s, larger_s), entry)

    def _num_configurations(self, untraced: _Untraced) -> int:
        """Return the number of configurations of degrees that were never traced, from the graph that bounds them."""
        num_layers = self.coarse.costs(untraced.narrower).num_layers
        graph = self.coarse.graph(untraced.narrower)
        keys = [replace(untraced.degrees, microbatch=size) for size in untraced.microbatch_sizes]
        return sum(
            1
            for key in keys
            for _ in configurations(key, graph, num_layers, self.cluster, self.job, self.space)
        )

    @cached_property
    def _orders(self) -> tuple[Cluster, ...]:
        return orders(self.cluster, self.job.computed_in)

    def _unbounded(self, candidates: Iterable[Configuration]) -> list[Configuration]:
        """Return those degrees that neither a traced graph nor smaller ones of them bound."""
        unbounded: list[Configuration] = []
        for degrees in candidates:
            if self.coarse.narrower(degrees, unbounded) is None:
                unbounded.append(degrees)
        return unbounded

    def _are_graphs_cached(self) -> bool:
        """Return whether the graphs traced so far are in the cache, where other processes can leave theirs."""
        if self.trace is not cached_trace:
            return False
        return not to_trace(self.request.model, list(map(self.coarse.trace_arguments, self.coarse.graphs)))

    # -- partition, memory, judge ------------------------------------------------------------------------------------

    def work_out(self) -> None:
        """Evaluate the queued entries, the most promising first, until no other can be among the best."""
        total = len(self.waiting)
        while self.waiting or self._may_be_fast():
            if self._may_be_fast() and self.untraced[0].bound_s <= self.waiting.least_s:
                self._gather_untraced()
                continue
            bound_s, _, entry = self.waiting.pop()
            if bound_s >= self.longest_s:
                self._leave_out_slower(bound_s, entry)
                self.waiting = _Queue()
            else:
                self._advance(bound_s, entry, total)

    def _fit_first(self) -> None:
        """Fit a promising configuration of the graphs traced so far, so that there is a plan before the others are traced.

        It keeps everything or recomputes every layer, whichever has memory to spare: to choose what to recompute takes
        longer. After a configuration that does not fit, only those without a pipeline are tried: bounds on their memory are
        closer.
        """
        is_good = self.fastest is not None and self.fastest.step_seconds <= _POOR * self.waiting.least_s
        if is_good or not self.shows_first:
            return
        fitter, num_before = fitter_of(self.coarse, self.space), len(self._tried_first)
        for _, _, entry in sorted(self.waiting.entries, key=itemgetter(0, 1)):
            num_tried = len(self._tried_first)
            if num_tried == _FIRST_TRIES or num_tried - num_before == _FIRST_TRIES_OF_GRAPH:
                return
            if num_tried > num_before and entry.configuration.pp > 1:
                continue
            first = self._with_memory_to_spare(entry)
            if first is None or first.configuration in self._tried_first:
                continue
            self._tried_first.add(first.configuration)
            split = fitter.split(first)
            if split and (fit := fitter.fit(split[1], math.inf, math.inf)) is not None:
                self.preliminary.append(self._on_own_devices(fit))
                return

    def _with_memory_to_spare(self, entry: Entry) -> Entry | None:
        """Return `entry` keeping everything, or else recomputing every layer, if that has memory to spare by its bound; None
        if neither has, or its graph is not traced."""
        if entry.bounded_by is not None:
            return None
        setting = entry.configuration.recompute
        for recompute in ("none", "full") if setting == "auto" else (setting,):
            configuration = replace(entry.configuration, recompute=recompute)
            missing = self.coarse.missing_bytes(configuration, configuration.traced, entry.cluster)
            if missing < -_TO_SPARE * self.usable_bytes:
                return replace(entry, configuration=configuration)
        return None

    def _advance(self, bound_s: float, entry: Entry, total: int) -> None:
        """Trace, partition or fit an entry, whichever is next, and queue it again unless it is fitted or left out."""
        if entry.bounded_by is not None:
            if not self.fitter.fits_in_smaller(entry):
                self._leave_out_larger(entry)
            elif (traced := self._with_own_graph(entry)) is not None:
                self._queue(traced)
        elif not self._is_ready(bound_s, entry):
            self._prepare(bound_s, entry)
        else:
            self.fitted_s = bound_s
            self._prepare_next()
            self._trace_ahead([])
            self.report(f"{max(total - len(self.waiting), 0)} of {total}: {entry.configuration}")
            self._fit(entry)
            self.fitted_s = math.inf
        self._queue_alternatives()

    def _is_ready(self, bound_s: float, entry: Entry) -> bool:
        """Return whether an entry can be fitted: it is partitioned, and its bound includes what fits since have shown."""
        return entry.is_split and self.fitter.judged_s(entry) <= bound_s

    def _prepare(self, bound_s: float, entry: Entry) -> None:
        """Partition an entry, or bound it anew if it is partitioned; queue it again unless it is left out."""
        if entry.is_split:
            self.waiting.push(self.fitter.judged_s(entry), entry)
        elif (split := self.fitter.split(entry)) is None:
            self._leave_out_larger(entry)
        else:
            self.waiting.push(max(bound_s, split[0]), split[1])
            self._grow(split[1])

    def _prepare_next(self) -> None:
        """Prepare the most promising entries, so that idle cores can begin to fit them. Their number does not depend on the
        cores, so that the search is always the same."""
        ready = list[tuple[float, int, Entry]]()
        try:
            for _ in range(_STEPS):
                if len(ready) == _READY or self.waiting.least_s >= self.longest_s:
                    break
                item = bound_s, _, entry = self.waiting.pop()
                if entry.bounded_by is not None or self._is_ready(bound_s, entry):
                    ready.append(item)
                else:
                    self._prepare(bound_s, entry)
                    self._queue_alternatives()
        finally:  # `gap` needs the bounds of all entries, also after Ctrl-C
            self.waiting.put_back(ready)

    def _queue_alternatives(self) -> None:
        while self.fitter.alternatives:
            self._queue(self.fitter.alternatives.pop(0))

    def _may_be_fast(self) -> bool:
        """Return whether untraced degrees may be fast enough."""
        return bool(self.untraced) and self.untraced[0].bound_s < self.longest_s

    def _leave_out_slower(self, bound_s: float, first: Entry) -> None:
        """Leave out `first` and all queued entries as too slow."""
        self.num_bounded += sum(1 + len(entry.larger) for entry in (first, *self.waiting))
        if self.next_best is None or bound_s < self.next_best.seconds:
            self.next_best = NextBest(str(first.configuration), bound_s)
        near_s = (1 + MOST_FILLED) * self.longest_s
        for slower_s, _, entry in sorted([(bound_s, -1, first), *self.waiting.entries]):
            if entry.configuration.pp == 1 and not entry.bounded_by and slower_s < near_s:
                self.without_pipeline.append((slower_s, entry))
            elif entry.is_split and slower_s < near_s:
                self.slower.append(entry)

    def _with_own_graph(self, entry: Entry) -> Entry | None:
        """Return `entry` once its graph is traced; None, with the reason noted, where that fails."""
        key = self.with_pieces(entry.configuration.traced)
        configuration = replace(entry.configuration, loss_pieces=key.loss_pieces)
        self.report(f"degrees {key}")
        if key not in self.coarse.graphs:
            self._trace_ahead([self.coarse.trace_arguments(key)])
        try:
            self.coarse.costs(key)
        except (InputError, TraceError, ContractError) as error:
            self.fitter.exclude(configuration, str(error), lacks_memory=False)
            return self._with_own_graph(entry) if self._goes_without_pieces(key) else None
        return replace(entry, configuration=configuration, bounded_by=None)

    def _grow(self, split: Entry) -> None:
        """Queue the larger microbatches of a partitioned configuration; a sample takes at least `growing_share` of its time
        there, as only the fixed costs of operators shrink."""
        if split.larger:
            share = self.coarse.growing_share(split.configuration.traced)
            self._queue(replace(split.grown(), compute_s=share * self.fitter.least_compute_s(split)))

    def _leave_out_larger(self, entry: Entry) -> None:
        """Exclude the larger microbatches of an entry that does not fit."""
        while entry.larger:
            entry = entry.grown()
            self.fitter.exclude(entry.configuration, LARGER, lacks_memory=False)

    @property
    def best(self) -> Fit | None:
        """The fastest plan of the search so far, or None."""
        return min(self.fits, key=lambda fit: fit.step_seconds, default=None)

    @property
    def fastest(self) -> Fit | None:
        """The fastest plan so far, the preliminary one included, or None."""
        return min((*self.fits, *self.preliminary), key=lambda fit: fit.step_seconds, default=None)

    @property
    def gap(self) -> float:
        """Fraction of the best plan's time by which a configuration that was not fitted may be faster, by its lower bound; 1
        before all degrees have one."""
        if self.fastest is None or not self.is_gathered:
            return 1.0
        untraced_s = min((untraced.bound_s for untraced in self.untraced), default=math.inf)
        least_s = min(self.fitted_s, self.waiting.least_s, untraced_s)
        return max(0.0, 1 - least_s / self.fastest.step_seconds)

    def _so_far(self) -> str:
        """Return the best plan so far, for progress."""
        if self.fastest is None:
            return ""
        plan, gap = self.fastest.plan, self.gap
        degrees = f"pp {plan.pp} x dp {plan.dp}" + (f" x tp {plan.tp}" if plan.tp > 1 else "")
        others = f", others at most {gap:.0%} faster" if 0.01 <= gap < 1 else ""
        return f"best so far {format_seconds(self.fastest.step_seconds)} ({degrees}{others}); "

    @property
    def longest_s(self) -> float:
        """Plans whose steps take this long or longer are of no use: under our own runtime, once there are enough plans, any
        that is no faster than the best; under other runtimes, any that is not among the best."""
        enough = self.request.keep or (1 if self.is_own else KEPT)
        if len(self.fits) < enough:
            return self.request.below_s
        seconds = sorted(fit.step_seconds for fit in self.fits)
        return min(self.request.below_s, seconds[0 if self.is_own else enough - 1])

    def _fit(self, entry: Entry) -> None:
        """Add the plan of an entry, if it fits."""
        best_s = self.request.below_s if self.best is None else self.best.step_seconds
        fit = self.fitter.fit(entry, best_s, self.longest_s, self.waiting.partitioned(self.longest_s))
        if fit is None:
            return
        configuration = entry.configuration
        num_pieces, shape = configuration.loss_pieces, entry.shape
        whole = replace(configuration, loss_pieces=1, offload=False)
        first_pieces, first_s = self._first_fits.setdefault(whole, (num_pieces, fit.step_seconds))
        if num_pieces > first_pieces and first_s < fit.step_seconds:  # more pieces do not help here
            self.waiting.keep(
                lambda other: other.configuration.loss_pieces < num_pieces or other.shape != shape
            )
        self.add(fit)

    def add(self, fit: Fit) -> None:
        """Add a plan."""
        self.fits.append(self._on_own_devices(fit))

    def _on_own_devices(self, fit: Fit) -> Fit:
        return replace(fit, plan=on_devices_of(fit.plan, self.cluster, fit.entry.cluster))

    # -- pieces of the loss ------------------------------------------------------------------------------------------

    def with_pieces(self, key: Configuration, piece_tokens: int | None = None) -> Configuration:
        """Return `key` with the number of loss pieces of the request; where that is automatic, with pieces of `piece_tokens`
        or those tried now, or smaller ones where logits are large."""
        if not self.is_own:
            return replace(key, loss_pieces=1)
        given = self.space.loss_pieces
        tokens = self.piece_tokens if piece_tokens is None else piece_tokens
        return replace(key, loss_pieces=self._pieces(key, tokens) if given == "auto" else given)

    def _pieces(self, key: Configuration, piece_tokens: int) -> int:
        num_tokens = key.microbatch * self.job.sequence_length
        logits = self.logits_bytes(key.microbatch, key.tp)
        if not self.has_pieces or not logits:
            return 1
        by_share = pieces_by_share(logits, num_tokens, self.usable_bytes)
        of_tokens = pieces_of_tokens(piece_tokens, num_tokens) if piece_tokens else 1
        return max(by_share, of_tokens)

    def short_of_memory(self) -> list[Shape]:
        """Return the configurations that may fit, or be faster, with the loss in pieces."""
        plans = [fit.plan for fit in self.fits]
        return short_of_memory(plans, self.fitter.excluded, self.logits_bytes, self.usable_bytes)

    @property
    def whole_sequences(self) -> Configuration | None:
        """Key of the best plan's graph without sequence parallelism; None if the plan has none, or the request sets it."""
        if self.best is None or self.space.sequence_parallel is not None:
            return None
        key = self.best.entry.configuration.traced
        return replace(key, sequence_parallel=False) if key.sequence_parallel else None

    def graphs_of(self, shape: Shape) -> list[Configuration]:
        """Return the keys of the graphs of a shape, with the loss in one piece."""
        return [
            replace(key, loss_pieces=1)
            for key in self.coarse.graphs
            if (key.tp, key.microbatch) == (shape.tp, shape.microbatch_size)
        ]

    def logits_bytes(self, microbatch: int, tp: int) -> int:
        """Return the bytes of a microbatch's logits on one of `tp` ranks."""
        return logits_bytes(self.request.model, microbatch * self.job.sequence_length, tp)

    def _goes_without_pieces(self, key: Configuration) -> bool:
        """Return whether to retry a failed trace with the loss in one piece; if so, the whole search goes on with one."""
        if key.loss_pieces == 1 or self.space.loss_pieces != "auto":
            return False
        self.has_pieces = False
        return True

    # -- result ------------------------------------------------------------------------------------------------------

    def result(self) -> SearchResult:
        """Return the best plans; of a search that was ended before it had any, the preliminary one.

        Raises:
            PlanError: no configuration fits.
        """
        fits = self.fits or self.preliminary
        if not fits:
            raise self.fitter.failure()
        num_bounded = (
            self.num_bounded + self.fitter.num_slow + sum(map(self._num_configurations, self.untraced))
        )
        plans = sorted((fit.plan for fit in fits), key=lambda plan: plan.predictions.step_seconds)
        beyond = self.job.beyond(self.cluster.device) if self.cluster.is_homogeneous else None
        warnings = operator_warnings(self.coarse.without_rule) + ([] if beyond is None else [beyond])
        kept = (ranked(plans) if self.is_own else plans)[: self.request.keep or KEPT]
        return SearchResult(kept, self.fitter.excluded, warnings, len(plans), num_bounded, self.next_best)
