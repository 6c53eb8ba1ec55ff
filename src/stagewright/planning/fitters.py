"""Fitters: how a search bounds, cuts and fits its configurations.

Other runtimes have stages of whole layers and recompute every layer alike; ours is cut between any two operators, and
recomputes, offloads and keeps on the host what memory asks for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats
from stagewright.errors import PlanError
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.graph.flat_buffers import GRADIENTS, PARAMETERS
from stagewright.planning.advice import misses_memory
from stagewright.planning.arranging import cluster_for
from stagewright.planning.assignment.device_order import usable_bytes_of_ranks
from stagewright.planning.bounds.coarse import Coarse
from stagewright.planning.candidate import (
    ALL_TOGETHER,
    Candidate,
    approximate_seconds,
    faster_candidate,
    fastest_partition,
    make_candidate,
    make_plan,
    make_program,
    streamed_cuts,
    with_cuts,
)
from stagewright.planning.configuration import Configuration
from stagewright.planning.memory.fits_ahead import Attempt, FitsAhead
from stagewright.planning.memory.fitting import Entry, Fit, Fitting, Miss, lacking_bytes
from stagewright.planning.memory.host_optimizer import may_stream, may_use_host, misses_host, steps_once
from stagewright.planning.partition.stage_terms import (
    Within,
    known_ranges,
    partition_within,
    recomputed_within,
    stage_ranges_of,
)
from stagewright.planning.prediction.staged_model import allocatable_bytes, costs_by_stage
from stagewright.planning.search_result import Excluded
from stagewright.planning.space import Space, streamed_configurations
from stagewright.schedule.in_flight import in_flight
from stagewright.units import format_bytes

_SHIFTS = 6
"""Maximum attempts to move layers off devices that run out of memory."""

_ROUGH = 0.005
"""Share of a step by which coarse costs of stages may be too high. In eight searches, from tiny models to Llama-2-7B on 16
A100, each of the 53 plans took at least 1.005 times what these costs predict."""

_ALIKE = 0.005
"""Share of a step by which the error of coarse costs may differ between `_nearly_alike` configurations."""

_OFFLOADING = 0.1
"""The same for alike configurations that offload: a little less memory may cost much time."""

_MEMORY_ANYWAY = "memory whatever its stages recompute or offload"
"""What a configuration lacks that needs too much for any choice of these."""

_LITTLE = 0.02
"""Share of a device's memory below which it makes no difference how state is sharded."""

_WHOLE_BACKWARDS = "1f1b", "gpipe", "interleaved-1f1b", "breadth-first"
"""Schedules that run nothing while a rank waits for its first microbatch or for cotangents."""


def fitter_of(coarse: Coarse, space: Space) -> Fitter:
    """Return the fitter for the runtime of a search's job."""
    kind = OperatorFitter if coarse.job.runtime == STAGEWRIGHT else LayerFitter
    return kind(coarse, space)


class Fitter(ABC):
    """Bounds, cuts and fits the entries of a search, and records those that do not fit."""

    def __init__(self, coarse: Coarse, space: Space) -> None:
        self.coarse, self.space = coarse, space
        self.cluster, self.job = coarse.cluster, coarse.job
        self.excluded: list[Excluded] = []
        self.num_slow = 0
        """Number of configurations that turned out too slow while they were fitted."""
        self.alternatives: list[Entry] = []
        """Entries worth trying in addition, which the search takes from here."""
        self.nearest_bound: tuple[int, Entry] | None = None
        """The fewest bytes that a configuration given up before it was fitted lacks, and its entry."""

    def exclude(
        self,
        configuration: Configuration,
        reason: str,
        missing_bytes: int | None = None,
        *,
        lacks_memory: bool = True,
    ) -> None:
        """Note why a configuration has no plan."""
        self.excluded.append(Excluded.of(configuration, reason, missing_bytes, lacks_memory))

    def _exclude_by_bound(self, entry: Entry, missing: int) -> None:
        self.exclude(
            entry.configuration, f"lacks {format_bytes(missing)} of memory a device, or more", missing
        )
        self._note_bound(entry, missing)

    def _note_bound(self, entry: Entry, missing: int) -> None:
        if self.nearest_bound is None or missing < self.nearest_bound[0]:
            self.nearest_bound = missing, entry

    def _shared_s(self, entry: Entry) -> float:
        """Return a lower bound on the seconds of forwards and backwards, as if ranks could divide them evenly."""
        traced = entry.graph_key
        share = entry.configuration.microbatch / traced.microbatch
        if entry.bounded_by is not None:
            share *= self.coarse.growing_share(traced)
        return share * self.coarse.first_bound_s(entry.configuration, traced, entry.cluster)

    @abstractmethod
    def bound_s(self, entry: Entry) -> float:
        """Return a lower bound on the seconds of a step, before the model is cut."""

    @abstractmethod
    def fits_in_smaller(self, entry: Entry) -> bool:
        """Return whether an entry may fit, from the graph of smaller microbatches; note the reason if not."""

    @abstractmethod
    def split(self, entry: Entry) -> tuple[float, Entry] | None:
        """Return an entry with its cuts, and a lower bound on its seconds; None, with the reason noted, if it cannot fit."""

    def least_compute_s(self, entry: Entry) -> float:
        """Return a lower bound on the compute seconds of a partitioned entry, whatever may still be tried to speed it up;
        those of its larger microbatches follow from it."""
        return entry.compute_s

    def judged_s(self, entry: Entry) -> float:
        """Return the lower bound on the seconds of a partitioned entry, corrected by what fits of similar ones took; 0 where
        the bound of `split` needs no correction."""
        return 0.0

    @abstractmethod
    def fit(self, entry: Entry, best_s: float, longest_s: float, others: Iterable[Entry] = ()) -> Fit | None:
        """Return the plan of an entry that was split; None, with the reason noted, if it does not fit or is too slow.

        Args:
            best_s: seconds of the best plan so far.
            longest_s: plans whose steps take this long or longer are of no use.
            others: entries that are likely to be next, the most likely first.
        """

    def failure(self) -> PlanError:
        """Return why nothing fits."""
        if self.nearest_bound is None:
            return PlanError(self.excluded[0].reason)
        missing, entry = self.nearest_bound
        lacks = (
            f"{format_bytes(missing)} a device or more"
            if missing > 0
            else "memory whatever its stages recompute"
        )
        return PlanError(
            f"no configuration fits on cluster '{self.cluster.name}': {entry.configuration} lacks {lacks}, the least of "
            "all; use more devices, shorter samples, or a higher memory limit"
        )


class LayerFitter(Fitter):
    """For runtimes that cut between layers and recompute every layer alike."""

    def __init__(self, coarse: Coarse, space: Space) -> None:
        super().__init__(coarse, space)
        self._nearest: Candidate | None = None

    def bound_s(self, entry: Entry) -> float:
        return max(entry.compute_s, self._shared_s(entry))

    def fits_in_smaller(self, entry: Entry) -> bool:
        traced = entry.graph_key
        times = entry.configuration.microbatch // traced.microbatch
        smaller = replace(
            entry.configuration, microbatch=traced.microbatch, loss_pieces=traced.loss_pieces,
            num_microbatches=times * entry.configuration.num_microbatches,
        )  # fmt: skip
        missing = self.missing_bytes(self._in_layers(replace(entry, configuration=smaller)))
        if missing > 0:  # larger ones do not need less
            self._exclude_by_bound(entry, missing)
        return missing <= 0

    def split(self, entry: Entry) -> tuple[float, Entry] | None:
        split = self._in_layers(entry)
        if (missing := self.missing_bytes(split)) > 0:
            self._exclude_by_bound(split, missing)
            return None
        configuration = split.configuration
        bound_s = self.coarse.bound_s(configuration, configuration.traced, split.cluster)
        return bound_s, replace(split, compute_s=bound_s)

    def _in_layers(self, entry: Entry) -> Entry:
        """Return an entry with the layers of its stages."""
        configuration = entry.configuration
        counts = self.coarse.split(configuration, configuration.traced, entry.cluster)
        return replace(entry, configuration=replace(configuration, layers_per_stage=counts), is_split=True)

    def missing_bytes(self, entry: Entry) -> int:
        """Return a lower bound on the bytes that a device lacks; negative where all have some to spare."""
        configuration = entry.configuration
        return self.coarse.missing_bytes(configuration, configuration.traced, entry.cluster)

    def fit(self, entry: Entry, best_s: float, longest_s: float, others: Iterable[Entry] = ()) -> Fit | None:
        candidate = self._candidate(entry, longest_s)
        if candidate is None:
            self.num_slow += 1
            return None
        missing = candidate.excess_bytes
        if missing <= 0:
            model_costs = self.coarse.model_costs(entry.configuration.traced)
            plan = make_plan(candidate, model_costs, self.coarse.reference)
            missing = lacking_bytes(plan, candidate)
            if missing <= 0:
                return Fit(plan, entry)
        self.exclude(entry.configuration, f"lacks {format_bytes(missing)} of memory a device", missing)
        if self._nearest is None or missing < self._nearest.excess_bytes:
            self._nearest = replace(candidate, excess_bytes=missing)
        return None

    def _candidate(self, entry: Entry, longest_s: float) -> Candidate | None:
        """Return the candidate with the layers per stage of `entry`; where devices differ and one lacks memory, one with
        other layers per stage if that fits.

        None where a step is known to be too slow: time is checked first, as it takes less than memory to work out.
        """
        configuration, cluster = entry.configuration, entry.cluster
        model_costs = self.coarse.model_costs(configuration.traced)
        fastest = faster_candidate(model_costs, configuration, cluster, self.job, longest_s)
        if fastest is None or fastest.excess_bytes <= 0:
            return fastest
        if len(cluster.nodes) == 1 or configuration.layers_per_stage is None:
            return fastest
        counts = configuration.layers_per_stage
        most, candidate = [sum(counts)] * len(counts), fastest
        for _ in range(_SHIFTS):
            staged = candidate.staged
            for memory in candidate.memories:
                usable = staged.usable_bytes(memory.rank)
                if (excess := staged.missing_bytes([memory])) > 0:
                    for stage in staged.program.placement.stages_of(memory.rank):
                        most[stage] = min(counts[stage] - 1, int(counts[stage] * usable / (usable + excess)))
            if min(most) < 1 or sum(most) < sum(counts):
                break
            counts = self.coarse.split(configuration, configuration.traced, cluster, most) or counts
            shifted = replace(configuration, layers_per_stage=counts)
            candidate = make_candidate(model_costs, shifted, cluster, self.job)
            if candidate.excess_bytes <= 0:
                return candidate
        return fastest

    def failure(self) -> PlanError:
        return super().failure() if self._nearest is None else misses_memory(self._nearest, self.job)


class _Lacking(NamedTuple):
    """The needs of a configuration that lacks memory whatever it recomputes or offloads."""

    counts: Floats
    """Microbatches in flight on every stage."""
    state: Floats
    """Bytes of state that a rank keeps of every operator."""
    level: int
    """Its sharding level: it lacks memory with the buffers of that level."""
    spare_bytes: float
    """Additional bytes, of all ranks together, with which it would still lack memory."""


class OperatorFitter(Fitter):
    """For our own runtime."""

    def __init__(self, coarse: Coarse, space: Space) -> None:
        super().__init__(coarse, space)
        self.fitting = Fitting(coarse.reference, self.job, space.host_optimizer)
        self.ahead = FitsAhead(self._work_out)
        self._misses: list[Miss] = []
        self._misjudged: dict[Configuration, float] = {}
        """Step seconds as a fraction of the expected ones, by alike configurations; a lower bound of it where the step was
        too slow."""
        self._nearly: dict[Configuration, float] = {}
        """The least of these by `_nearly_alike` configurations."""
        self._without_headroom: dict[tuple[object, ...], list[_Lacking]] = {}
        """Configurations that lack memory whatever they recompute or offload, by `_headroom_key`."""
        self._lost_share = 0.0
        """Share of memory that the best plan so far lost to fragmentation."""
        self._offloading_pays = False
        """Whether the best plan so far offloads: most do not, and to try it takes time."""
        self._added: set[Configuration] = set()
        """Configurations of the alternatives so far."""
        (self._usable_bytes,) = usable_bytes_of_ranks(self.job, self.cluster, 1)

    def fits_in_smaller(self, entry: Entry) -> bool:
        return True  # what does not fit is recomputed or offloaded

    # -- seconds -----------------------------------------------------------------------------------------------------

    def bound_s(self, entry: Entry) -> float:
        configuration = entry.configuration
        shared_s = self._shared_s(entry)
        # Before a rank's first forward and after its last backward, a microbatch runs on the stages before its own.
        whole_s = shared_s * configuration.pp / configuration.num_microbatches
        waits = configuration.schedule in _WHOLE_BACKWARDS
        fill_s = whole_s * (configuration.pp - 1) / configuration.num_stages if waits else 0.0
        return self.with_network(entry, max(entry.compute_s, shared_s + fill_s))

    def with_network(self, entry: Entry, compute_s: float) -> float:
        """Return the seconds of a step whose forwards and backwards take so long."""
        traced = entry.graph_key
        sharding_s = self.coarse.sharding_s(entry.configuration, traced, entry.cluster)
        return max(compute_s, sharding_s) + self.coarse.after_s(entry.configuration, traced, entry.cluster)

    def judged_s(self, entry: Entry) -> float:
        alike = self._alike(entry.configuration)
        nearly = self._nearly.get(_nearly_alike(alike), 1 - _ROUGH + _ALIKE) - _ALIKE
        share = self._misjudged.get(alike, nearly)
        if alike.offload:
            share = max(1 - _ROUGH, share * (1 - _OFFLOADING))
        return self._expected_s(entry) * share

    def _expected_s(self, entry: Entry) -> float:
        """Return the step seconds of a partitioned entry by coarse costs."""
        return self.with_network(entry, entry.compute_s)

    def _alike(self, configuration: Configuration) -> Configuration:
        """Return a key of configurations whose coarse costs have about the same error: those that differ only by where the
        optimizer runs, which takes little time, and, where trained parameters take little memory, as adapters do, by
        sharding levels below `_first_of_own_kind`."""
        alike = replace(configuration, host_optimizer=False, offload=_offloads(configuration))
        trained_bytes = float(self.coarse.costs(configuration.traced).trained_bytes.sum()) / configuration.pp
        if configuration.level < _first_of_own_kind(alike) and trained_bytes < _LITTLE * self._usable_bytes:
            alike = replace(alike, zero=0)
        return alike

    def _learn(self, entry: Entry, seconds: float) -> None:
        """Note that a step of a partitioned entry takes `seconds`, or at least that if it is too slow."""
        alike, share = self._alike(entry.configuration), seconds / self._expected_s(entry)
        self._misjudged.setdefault(alike, share)
        nearly = _nearly_alike(alike)
        self._nearly[nearly] = min(share, self._nearly.get(nearly, share))

    # -- cuts --------------------------------------------------------------------------------------------------------

    def split(self, entry: Entry) -> tuple[float, Entry] | None:
        configuration = entry.configuration
        key = configuration.traced
        missing = self.coarse.missing_anywhere(configuration, key, entry.cluster)
        if missing > 0:
            self._exclude_by_bound(entry, missing)
            self._try_on_host(entry)
            return None
        if configuration.saves and self._needs_more_than_what_lacks(entry):
            self._exclude_hopeless(entry, missing)
            return None
        model_costs = self.coarse.model_costs(key)
        try:
            cluster = entry.cluster
            if len(cluster.nodes) == 1:
                cluster = cluster_for(configuration, model_costs, cluster, self.job)
            if configuration.streamed:
                return self._split_streamed(replace(entry, cluster=cluster))
            cuts, compute_s = fastest_partition(model_costs, configuration, cluster)
        except PlanError as error:  # too few legal cuts
            self.exclude(configuration, str(error), lacks_memory=False)
            return None
        busy_s = self._busy_s(configuration)
        split = replace(entry, cluster=cluster, cuts=cuts, is_split=True)
        if configuration.saves:
            within = self._within_memory(split)
            if self._may_offload(configuration) and (within is None or self._offloading_pays):
                offloading = replace(split, configuration=replace(configuration, offload=True))
                moved = self._within_memory(offloading)
                if moved is not None and (within is None or moved.seconds < within.seconds):
                    split, within = offloading, moved
            if within is None:
                self._note_needs(entry)
                self._exclude_hopeless(entry, missing)
                return None
            compute_s, busy_s = max(compute_s, within.seconds), max(busy_s, within.busy_s)
        elif (miss := self.fitting.without_partition(split, model_costs)) is not None:
            self._note(miss)
            self._try_on_host(entry)
            return None
        factor = self._splitting_factor(key)
        split = replace(split, compute_s=factor * compute_s, busy_s=factor * busy_s)
        return self.judged_s(split), split

    def _split_streamed(self, entry: Entry) -> tuple[float, Entry]:
        """Return an entry with streamed weights cut between layers; raises `PlanError` for too few of them."""
        configuration, cluster = entry.configuration, entry.cluster
        model_costs = self.coarse.model_costs(configuration.traced)
        program, width = make_program(configuration), configuration.ranks_per_stage
        cuts = streamed_cuts(model_costs, configuration, cluster)
        stage_costs = costs_by_stage(model_costs, cluster, program, width)
        compute_s = approximate_seconds(stage_costs, cuts, program, cluster, width)
        busy_s = self._busy_s(configuration)
        split = replace(entry, cuts=cuts, is_split=True)
        if configuration.saves and (within := self._within_memory(split)) is not None:
            compute_s, busy_s = max(compute_s, within.seconds), max(busy_s, within.busy_s)
        split = replace(split, compute_s=compute_s, busy_s=busy_s)
        return self.judged_s(split), split

    def _may_offload(self, configuration: Configuration) -> bool:
        """Return whether offloading may be tried: not where all forwards run first, as what they save could not be copied
        while they compute."""
        return self.space.offload and configuration.schedule not in ALL_TOGETHER

    def least_compute_s(self, entry: Entry) -> float:
        if self._may_offload(entry.configuration) and not self._offloading_pays and entry.configuration.saves:
            return entry.compute_s - self.saving_s(entry)
        return entry.compute_s

    def _busy_s(self, configuration: Configuration) -> float:
        """Return the mean compute seconds of ranks that keep everything, from range sums."""
        model_costs = self.coarse.model_costs(configuration.traced)
        return configuration.num_microbatches * float(model_costs.seconds[-1]) / configuration.pp

    def _splitting_factor(self, key: Configuration) -> float:
        """Return the whole model's seconds as a multiple of its range sums, at least 1: these leave out what splitting adds,
        such as the accumulation of weight gradients."""
        model_costs = self.coarse.model_costs(key)
        return max(1.0, self.coarse.costs(key).total_seconds / float(model_costs.seconds[-1]))

    def saving_s(self, entry: Entry) -> float:
        """Return the mean seconds that the ranks of a partitioned entry recompute, from range sums."""
        configuration = entry.configuration
        kept_s = self._splitting_factor(configuration.traced) * self._busy_s(configuration)
        return max(0.0, entry.busy_s - kept_s)

    def _within_memory(self, split: Entry) -> Within | None:
        """Return the fastest partition within memory with what it must recompute or offload, from range sums, or None."""
        configuration, cluster, cuts = split.configuration, split.cluster, split.cuts
        assert cuts is not None
        model_costs = self.coarse.model_costs(configuration.traced)
        program = make_program(configuration)
        placed = program.placement
        width = configuration.ranks_per_stage
        stage_costs = costs_by_stage(model_costs, cluster, program, width)
        transient = known_ranges(model_costs).most_transient(0, model_costs.size)
        capacities = []
        for costs, rank in zip(stage_costs, placed.rank_of_stage, strict=True):
            usable = allocatable_bytes(self.job.usable_bytes(costs.device, cluster), costs.device)
            number = len(placed.stages_of(rank))
            # A rank's streamed stages have transient values one at a time: together they need memory for those of one.
            alternates = transient * (1 - 1 / number) if configuration.streamed else 0.0
            capacities.append(usable / number + alternates)
        firsts = [rank * width for rank in placed.rank_of_stage]
        stage_ranges = stage_ranges_of(
            stage_costs, capacities, in_flight(program),
            lambda source, target, size: cluster.blocks_seconds(size, firsts[source], firsts[target], width),
            state_bytes=self._kept_state(configuration), offload=_offloads(configuration),
        )  # fmt: skip
        if configuration.streamed:
            return recomputed_within(program, stage_ranges, cuts)
        return partition_within(program, stage_ranges, cuts)

    def _needs(self, configuration: Configuration) -> tuple[Floats, Floats]:
        """Return the microbatches in flight on every stage, and the bytes of state that a rank keeps of every operator."""
        counts = np.array(in_flight(make_program(configuration)), float)
        return counts, np.diff(self._kept_state(configuration))

    def _kept_state(self, configuration: Configuration) -> Floats:
        """Return the bytes of state that a rank keeps, as prefix sums over operators."""
        model_costs = self.coarse.model_costs(configuration.traced)
        return configuration.kept_state(model_costs, self.job.precision)

    def _note_needs(self, entry: Entry, level: int = 0, spare_bytes: float = 0.0) -> None:
        """Note the needs of an entry that lacks memory whatever it recomputes or offloads, even with `spare_bytes` more on
        every rank. It has the buffers of a sharding `level`, which lower levels do without."""
        counts, state = self._needs(entry.configuration)
        lacking = _Lacking(counts, state, level, spare_bytes * entry.configuration.pp)
        self._without_headroom.setdefault(_headroom_key(entry, len(counts)), []).append(lacking)

    def _needs_more_than_what_lacks(self, entry: Entry) -> bool:
        """Return whether an entry that needs no more, with as many stages on the same devices, has lacked memory whatever it
        recomputes or offloads."""
        if not self._without_headroom:
            return False
        counts, state = self._needs(entry.configuration)
        level = self._alike(entry.configuration).level
        return any(
            level >= lacking.level
            and (counts >= lacking.counts).all()
            and np.maximum(lacking.state - state, 0.0).sum() <= lacking.spare_bytes
            for lacking in self._without_headroom.get(_headroom_key(entry, len(counts)), ())
        )

    def _exclude_hopeless(self, entry: Entry, missing: int) -> None:
        self.exclude(entry.configuration, f"lacks {_MEMORY_ANYWAY}")
        self._note_bound(entry, missing)
        self._try_on_host(entry)

    # -- memory ------------------------------------------------------------------------------------------------------

    def fit(self, entry: Entry, best_s: float, longest_s: float, others: Iterable[Entry] = ()) -> Fit | None:
        configuration = entry.configuration
        if configuration.offload and self._needs_more_than_what_lacks(entry):
            self._exclude_hopeless(entry, 0)
            return None
        later = (Attempt(other, best_s, longest_s, self._lost_share) for other in others)
        result = self.ahead.fit(Attempt(entry, best_s, longest_s, self._lost_share), later)
        little = _LITTLE * self._usable_bytes
        if isinstance(result, Miss):
            self._note(result)
            if result.is_too_slow and math.isfinite(longest_s):
                self._learn(entry, max(longest_s, result.least_s))
            # With a plan to be faster than, partitions that fit may have been left out as too slow.
            elif result.is_partitioned and _offloads(configuration) and math.isinf(best_s):
                level = self._alike(configuration).level
                self._note_needs(entry, level, little if (result.missing_bytes or 0) > little else 0.0)
            if result.was_short:
                self._try_on_host(entry, result.missing_bytes or little)
            return None
        if result.was_short:
            self._try_on_host(entry, little)
        self._learn(entry, result.step_seconds)
        if result.step_seconds < best_s:
            self._offloading_pays = _offloads(configuration)
            if configuration.saves:
                self._lost_share = result.lost_share
        return result

    def _work_out(self, attempt: Attempt) -> Fit | Miss:
        entry, best_s, longest_s, lost_share = attempt
        model_costs = self.coarse.model_costs(entry.configuration.traced)
        return self.fitting.fit(
            entry, model_costs, below_s=best_s, longest_s=longest_s, lost_share=lost_share
        )

    def _note(self, miss: Miss) -> None:
        """Record why an entry has no plan."""
        if miss.is_too_slow:
            self.num_slow += 1
        else:
            self.exclude(miss.entry.configuration, miss.reason, miss.missing_bytes)
            self._misses.append(miss)

    def _try_on_host(self, entry: Entry, num_bytes: float = 0.0) -> None:
        """Add to the alternatives what the space and the cluster allow of the entry with streamed weights and, if that frees
        `num_bytes` of every rank, the entry with the optimizer on the host."""
        self._try_streamed(entry)
        configuration = entry.configuration
        if self.space.host_optimizer != "auto" or configuration.host_optimizer or configuration.streamed:
            return
        if may_use_host(entry.cluster) and steps_once(configuration):
            on_host = replace(configuration, host_optimizer=True, offload=False)
            if self._state_bytes(configuration) - self._state_bytes(on_host) >= num_bytes:
                self._add_alternative(entry, on_host)

    def _state_bytes(self, configuration: Configuration) -> float:
        """Return the bytes of state that a rank of an even partition keeps."""
        return float(self._kept_state(configuration)[-1]) / configuration.pp

    def _try_streamed(self, entry: Entry) -> None:
        """Add the entry with streamed weights to the alternatives, where the space and the cluster allow that."""
        configuration = entry.configuration
        if self.space.streamed != "auto" or configuration.streamed or not may_stream(entry.cluster):
            return
        key = entry.graph_key
        plain = replace(configuration, host_optimizer=False, offload=self.space.offload)
        has_host = self.space.host_optimizer != "never" and may_use_host(entry.cluster)
        for streamed in streamed_configurations(
            plain, self.coarse.costs(key).num_layers, self.coarse.graph(key)
        ):
            if has_host or not streamed.host_optimizer:
                self._add_alternative(entry, streamed)

    def _add_alternative(self, entry: Entry, changed: Configuration) -> None:
        """Add an entry with a changed configuration to the alternatives, with the microbatch sizes not added before."""
        alternative = Entry(changed, entry.cluster, entry.larger)
        sizes = [alternative]
        while sizes[-1].larger:
            sizes.append(sizes[-1].grown())
        new = [size for size in sizes if size.configuration not in self._added]
        if new:
            self._added.update(size.configuration for size in new)
            self.alternatives.append(replace(new[0], larger=tuple(size.configuration for size in new[1:])))

    def afresh(self, fit: Fit, below_s: float, *, offload: bool, headroom: int | None = None) -> Fit | None:
        """Return a new plan with the cuts of `fit`, by default with as much headroom as it takes; None if it does not fit or
        takes `below_s` or longer."""
        configuration = fit.entry.configuration
        entry = replace(fit.entry, configuration=replace(configuration, offload=offload))
        model_costs = self.coarse.model_costs(configuration.traced)
        result = self.fitting.fit(entry, model_costs, below_s=below_s, longest_s=below_s, headroom=headroom)
        return result if isinstance(result, Fit) and result.step_seconds < below_s else None

    def keeping_all(self, entry: Entry) -> Fit:
        """Return the plan of a partitioned entry that keeps everything, whether or not it fits."""
        configuration = entry.configuration
        model_costs = self.coarse.model_costs(configuration.traced)
        candidate = with_cuts(model_costs, configuration, entry.cuts or (), entry.cluster, self.job)
        return Fit(make_plan(candidate, model_costs, self.coarse.reference), entry)

    def refined(self, entry: Entry) -> Fit | None:
        """Return the plan of an entry after a longer search for what it recomputes, or None if it does not fit."""
        model_costs = self.coarse.model_costs(entry.configuration.traced)
        result = replace(self.fitting, thorough=True).fit(entry, model_costs)
        return result if isinstance(result, Fit) else None

    def last_resort(self) -> Fit | None:
        """Return a plan where nothing has fitted, from the entry that lacks the least memory, or None.

        What it recomputes is searched for longer; if that is not enough, it recomputes everything, with the cuts that need
        the least memory.
        """
        entry = self._nearest_entry()
        if entry is None:
            return None
        if entry.configuration.saves:
            if (refined := self.refined(entry)) is not None:
                return refined
            entry = replace(entry, configuration=replace(entry.configuration, recompute="full"))
        model_costs = self.coarse.model_costs(entry.configuration.traced)
        cuts, _ = fastest_partition(model_costs, entry.configuration, entry.cluster)
        result = self.fitting.fit(replace(entry, cuts=cuts), model_costs, tight=True)
        if isinstance(result, Fit):
            return result
        self._note(result)
        return None

    def _nearest_entry(self) -> Entry | None:
        """Return the entry that lacks the least memory as far as is known, partitioned; None if there is none."""
        if worked_out := [miss for miss in self._misses if miss.is_partitioned]:
            return min(worked_out, key=_missing).entry
        bounded = [miss for miss in self._misses if miss.least_bytes is not None]
        if bounded:
            entry = min(bounded, key=lambda miss: miss.least_bytes or 0).entry
        elif self.nearest_bound is not None:
            entry = self.nearest_bound[1]
        else:
            return None
        configuration = entry.configuration
        model_costs = self.coarse.model_costs(configuration.traced)
        try:
            cuts, _ = fastest_partition(model_costs, configuration, entry.cluster)
        except PlanError:  # too few legal cuts
            return None
        entry = replace(entry, cuts=cuts, is_split=True)
        candidate = make_candidate(model_costs, configuration, entry.cluster, self.job)
        self._misses.append(Miss(entry, "lacks memory", candidate.excess_bytes, True, candidate))
        return entry

    def failure(self) -> PlanError:
        worked_out = [miss for miss in self._misses if miss.is_partitioned]
        on_hosts = [miss for miss in self._misses if miss.is_on_host]
        host_optimizer = self.space.host_optimizer
        if on_hosts and (host_optimizer == "always" or not worked_out):
            nearest = min(on_hosts, key=_missing)
            return misses_host(nearest.entry.configuration, nearest.missing_bytes or 0, host_optimizer)
        if worked_out:
            result: Fit | Miss = min(worked_out, key=_missing)
            if result.candidate is None:  # it comes from another process
                model_costs = self.coarse.model_costs(result.entry.configuration.traced)
                result = self.fitting.fit(result.entry, model_costs)
            if isinstance(result, Miss) and result.candidate is not None:
                return misses_memory(result.candidate, self.job)
        return super().failure()


def _missing(miss: Miss) -> float:
    return math.inf if miss.missing_bytes is None else miss.missing_bytes


def _offloads(configuration: Configuration) -> bool:
    """Return whether stages offload saved values, other than stages with streamed weights."""
    return configuration.offload and not configuration.streamed


def _nearly_alike(alike: Configuration) -> Configuration:
    """Return a key of configurations whose `_alike` keys differ only by loss pieces and by sharding levels below
    `_first_of_own_kind`."""
    is_of_own_kind = alike.level >= _first_of_own_kind(alike)
    return replace(alike, loss_pieces=1, zero=alike.level if is_of_own_kind else 0)


def _first_of_own_kind(configuration: Configuration) -> int:
    """Return the lowest sharding level whose stages take other times than those of the levels below: the one that shards
    parameters; where stages offload, the one that shards gradients, as each sharding unit is then a stage and waits for its
    own copies."""
    return GRADIENTS if _offloads(configuration) else PARAMETERS


def _headroom_key(entry: Entry, num_stages: int) -> tuple[object, ...]:
    """Return a key of entries that divide the same graph into as many stages on the same devices."""
    configuration = entry.configuration
    return configuration.traced, configuration.pp, num_stages, entry.cluster
