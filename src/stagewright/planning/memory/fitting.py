"""Fitting a configuration in memory: the plan that leaves headroom for fragmentation, or why there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.flat_buffers import GRADIENTS
from stagewright.planning.assignment.device_order import usable_bytes_of_ranks
from stagewright.planning.candidate import (
    SHRINKS,
    Candidate,
    make_plan,
    make_program,
    saved_counts,
    seconds_in_order,
    takes_longer,
    with_cuts,
    within_memory,
)
from stagewright.planning.checkpointing.fit import TooSlow
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.memory.host_optimizer import host_excess_bytes, saving_with_hosts, ways_on_hosts
from stagewright.planning.partition.solver import MemoryBudget, has_partition
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.staged_model import costs_by_stage
from stagewright.planning.space import HostOptimizer
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_bytes

_MOST_FRAGMENTS = 0.3
"""Share of memory lost to fragmentation above which a configuration is given up."""

_HEADROOM_STEPS = 25
"""Headroom grows by at least the memory limit divided by this number."""

_OTHER_UNITS = 0.01
"""Share of a step by which other cuts may be faster, because other sharding units fit with them."""

_HALVINGS = 5
"""Number of amounts tried between the mean excess of the ranks and an amount that suffices."""


@dataclass(frozen=True)
class Entry:
    """A configuration in the queue of a search."""

    configuration: Configuration
    cluster: Cluster
    """The cluster as the configuration's ranks number its devices."""
    larger: tuple[Configuration, ...] = ()
    """The same in larger microbatches, evaluated once this one is partitioned."""
    cuts: tuple[int, ...] | None = None
    """Of the fastest partition, between operators; None before there is one, and where layers are cut evenly."""
    is_split: bool = False
    """Whether it is partitioned, so that its bound follows from its stages."""
    compute_s: float = 0.0
    """Seconds of its forwards and backwards; a lower bound until it is partitioned."""
    busy_s: float = 0.0
    """Mean seconds that its ranks compute, once it is partitioned."""
    bounded_by: Configuration | None = None
    """Key of the graph, in smaller microbatches, that bounds it while its own graph may not be traced yet."""

    @property
    def graph_key(self) -> Configuration:
        """Key of a graph that has been traced."""
        return self.bounded_by or self.configuration.traced

    @property
    def shape(self) -> Configuration:
        """Key of entries that differ only in the order of actions, sharding, recomputation as memory asks for, offloading,
        and how the loss is evaluated."""
        configuration = self.configuration
        gives_up = configuration.recompute in ("full", "auto")
        return replace(
            configuration, schedule="", chunks=None, zero=None, loss_pieces=1, host_optimizer=False, offload=False,
            recompute="none" if gives_up else configuration.recompute,
        )  # fmt: skip

    def grown(self) -> Entry:
        """Return the entry of the next of `larger`."""
        larger, *others = self.larger
        configuration = replace(
            self.configuration, microbatch=larger.microbatch, num_microbatches=larger.num_microbatches,
            loss_pieces=larger.loss_pieces, layers_per_stage=None,
        )  # fmt: skip
        return Entry(configuration, self.cluster, tuple(others), bounded_by=self.graph_key)


@dataclass(frozen=True)
class Fit:
    """A plan that fits, and the entry that it was made from."""

    plan: Plan
    entry: Entry
    headroom: int = 0
    """Bytes left free on every device for fragmentation, where stages recompute as memory asks for."""
    lost_share: float = 0.0
    """These as a share of a device's memory."""
    was_short: bool = False
    """Whether the fastest partition lacked memory, so that it is worth trying the optimizer on the host."""

    @property
    def step_seconds(self) -> float:
        return self.plan.predictions.step_seconds


@dataclass(frozen=True)
class Miss:
    """Why a configuration has no plan."""

    entry: Entry
    reason: str = ""
    """Empty for a configuration that is too slow."""
    missing_bytes: int | None = None
    is_partitioned: bool = False
    """Whether there is a partition, for which devices lack memory."""
    candidate: Candidate | None = None
    """The partition that lacks the least memory; None without a partition or from another process."""
    least_bytes: int | None = None
    """Lower bound on the bytes of its fullest rank, where there is no partition."""
    least_s: float = 0.0
    """Lower bound on the seconds of a step, as far as is known."""
    was_short: bool = True
    """Whether it is worth trying the optimizer on the host."""

    @property
    def is_too_slow(self) -> bool:
        """Whether it may fit, as far as is known, but is too slow to be of use."""
        return not self.reason

    @property
    def is_on_host(self) -> bool:
        """Whether it is hosts that lack memory."""
        return self.missing_bytes is not None and not self.is_partitioned and self.least_bytes is None


@dataclass(frozen=True)
class Fitting:
    """How configurations of a job are fitted in memory."""

    reference: ModelReference
    job: Job
    host_optimizer: HostOptimizer
    thorough: bool = False
    """Whether to search longer for what is recomputed, which takes seconds per rank."""

    def fit(
        self,
        entry: Entry,
        model_costs: RangeCosts,
        *,
        below_s: float = math.inf,
        longest_s: float = math.inf,
        tight: bool = False,
        headroom: int | None = None,
        lost_share: float = 0.0,
    ) -> Fit | Miss:
        """Return the plan of a partitioned configuration that leaves headroom for fragmentation, or why there is none.

        Args:
            below_s: plans that recompute or offload and whose steps take this long or longer are of no use.
            longest_s: plans of any kind whose steps take this long or longer are of no use.
            tight: whether to search for the cuts that need the least memory where others need too much.
            headroom: bytes to leave free on every device; by default as many as it takes.
            lost_share: the share of memory expected to be lost to fragmentation, tried first.
        """
        configuration, cluster, cuts = entry.configuration, entry.cluster, entry.cuts or ()
        if takes_longer(model_costs, configuration, cuts, cluster, self.job, longest_s):
            return Miss(entry, was_short=False)
        must_keep = not configuration.saves and not tight and not configuration.streamed
        if must_keep and (miss := self.without_partition(entry, model_costs, keeps=True)) is not None:
            return miss
        fastest = with_cuts(model_costs, configuration, cuts, cluster, self.job)
        if configuration.level >= GRADIENTS:  # its stages were not timed before
            least_s = seconds_in_order(fastest.staged) * (1 - _OTHER_UNITS)
            if least_s >= longest_s:
                return Miss(entry, was_short=False, least_s=least_s)
        limit = min(fastest.staged.usable_bytes(rank) for rank in range(configuration.pp))
        fragmented, was_short = list[Candidate](), False
        # Only the replay of the allocator in `make_plan` shows how much is lost to fragmentation.
        lost = 0 if fastest.excess_bytes <= 0 or tight else int(lost_share * limit)
        is_expected = lost > 0
        if headroom is not None:
            lost, is_expected = headroom, False
        while lost <= _MOST_FRAGMENTS * limit:
            start = fastest.with_headroom(lost)
            was_short |= start.excess_bytes > 0
            # If partitions do not fit with the expected headroom, all are tried again without it.
            shrinks = SHRINKS[:1] if is_expected else SHRINKS
            candidate = self._best_that_fits(start, model_costs, below_s, longest_s, shrinks)
            if candidate is None:
                return Miss(entry, was_short=was_short)
            if tight:
                candidate = _tightest(candidate, model_costs)
            # No candidate leaves as much headroom; this one may still fit if it loses less to fragmentation.
            is_last = candidate.excess_bytes > 0
            if is_last and is_expected:
                lost, is_expected = 0, False
                continue
            if is_last and fragmented and not (tight and candidate.with_headroom(0).excess_bytes <= 0):
                break
            if is_last and not fragmented:
                missing = candidate.excess_bytes
                reason = f"lacks {format_bytes(missing)} of memory a device"
                return Miss(entry, reason, missing, True, candidate, was_short=was_short)
            result = self._planned(entry, candidate, model_costs, lost, lost / limit, longest_s, was_short)
            if isinstance(result, Fit | Miss):
                return result
            lost, is_expected = lost + max(result, limit // _HEADROOM_STEPS), False
            fragmented.append(replace(candidate.with_headroom(0), excess_bytes=result))
            if is_last or headroom is not None:
                break
        least = min(fragmented, key=lambda candidate: candidate.excess_bytes)
        reason = f"lacks {format_bytes(least.excess_bytes)} of memory a device, lost to fragmentation"
        return Miss(entry, reason, least.excess_bytes, True, least, was_short=was_short)

    def _planned(
        self,
        entry: Entry,
        candidate: Candidate,
        model_costs: RangeCosts,
        headroom: int,
        lost_share: float,
        longest_s: float,
        was_short: bool,
    ) -> Fit | Miss | int:
        """Return the plan of a candidate that leaves `headroom`, or why it is of no use; if it loses more than that to
        fragmentation, the bytes that it still lacks."""
        ways = ways_on_hosts(candidate, self.host_optimizer)
        lacking = [host_excess_bytes(way.staged) for way in ways]
        if (missing := min(lacking)) > 0:
            reason = f"lacks {format_bytes(missing)} of memory on a host"
            return Miss(entry, reason, missing, was_short=was_short)
        seconds = math.inf
        for way in itertools.compress(ways, (excess <= 0 for excess in lacking)):
            plan = make_plan(way, model_costs, self.reference)
            seconds = min(seconds, plan.predictions.step_seconds)
            missing = lacking_bytes(plan, way) - headroom
            if missing <= 0:
                if not entry.configuration.saves:
                    return Fit(plan, entry, was_short=was_short)
                return Fit(plan, entry, headroom, lost_share, was_short)
        if seconds >= longest_s:  # with more headroom it is no faster
            return Miss(entry, was_short=was_short, least_s=seconds)
        return missing

    def without_partition(self, entry: Entry, model_costs: RangeCosts, *, keeps: bool = False) -> Miss | None:
        """Return why no partition has memory for the state and what stages must save, or None if there is one.

        With `keeps`, stages must save everything.
        """
        configuration = entry.configuration
        program = make_program(configuration)
        counts = saved_counts(program, model_costs)
        gives_up = configuration.saves or configuration.recompute == "full"
        if configuration.recompute == "model" or (not keeps and gives_up):
            counts = [0.0] * len(counts)
        kept_state = configuration.kept_state(model_costs, self.job.precision)
        limits = usable_bytes_of_ranks(self.job, entry.cluster, configuration.pp)
        ranks = program.placement.rank_of_stage
        stage_costs = costs_by_stage(model_costs, entry.cluster, program, configuration.ranks_per_stage)
        budget = MemoryBudget([limits[rank] for rank in ranks], counts, kept_state)
        if has_partition(stage_costs, budget):
            return None
        limit, least = min(limits), _least_bytes(model_costs, counts, kept_state, configuration.pp)
        if least <= limit:
            reason = f"no partition keeps every device within {format_bytes(limit)}"
            return Miss(entry, reason, least_bytes=least)
        reason = f"needs {format_bytes(least)} a device or more, of {format_bytes(limit)}"
        return Miss(entry, reason, least - limit, least_bytes=least)

    def _best_that_fits(
        self,
        fastest: Candidate,
        model_costs: RangeCosts,
        below_s: float,
        longest_s: float,
        shrinks: Sequence[float],
    ) -> Candidate | None:
        """Return the fastest partition if it fits; else one that keeps everything within memory or one that recomputes or
        offloads, whichever is faster; None if only batches of `longest_s` or longer may fit."""
        if fastest.excess_bytes <= 0:
            return fastest
        kept = within_memory(fastest, model_costs)
        configuration = fastest.configuration
        if not configuration.saves:
            return kept
        saving = saving_with_hosts(
            [fastest, kept],
            model_costs,
            self.host_optimizer,
            offload=configuration.offload,
            below_s=below_s,
            longest_s=longest_s,
            thorough=self.thorough,
            shrinks=shrinks,
        )
        if configuration.streamed:
            return None if isinstance(saving, TooSlow) else saving or kept
        fitting = [
            candidate
            for candidate in (kept, saving)
            if isinstance(candidate, Candidate) and candidate.excess_bytes <= 0
        ]
        if not fitting and isinstance(saving, TooSlow):
            return None
        return min(fitting, key=lambda candidate: run_timeline(candidate.staged).makespan_s, default=kept)


def _tightest(candidate: Candidate, model_costs: RangeCosts) -> Candidate:
    """Return the configuration of `candidate`, which does not fit, with the cuts that are over by least: those that fit with
    the smallest addition to the memory of every device."""
    staged = candidate.staged
    if candidate.excess_bytes <= 0:
        return candidate  # only fragmentation exceeds the memory, which cuts cannot predict
    best, most = candidate, candidate.excess_bytes
    lacking = [staged.missing_bytes([memory]) for memory in candidate.memories]
    least = sum(lacking) // len(lacking)  # as if all were over equally
    for _ in range(_HALVINGS):
        more = (least + most) // 2
        tried = within_memory(candidate.with_headroom(candidate.configuration.headroom - more), model_costs)
        if more + tried.excess_bytes < most:
            best, most = tried.with_headroom(candidate.configuration.headroom), more + tried.excess_bytes
        if tried.excess_bytes > 0:
            least = more
    return best


def lacking_bytes(plan: Plan, candidate: Candidate) -> int:
    """Return the bytes that the fullest rank of `plan` reserves beyond what its device has."""
    return max(
        rank.reserved_peak_bytes - candidate.staged.usable_bytes(rank.rank) for rank in plan.predictions.ranks
    )


def _least_bytes(model_costs: RangeCosts, counts: Sequence[float], kept_state: Floats, pp: int) -> int:
    """Return the bytes of the fullest rank as if state and saved values could be spread evenly."""
    saved = float(model_costs.saved_bytes[-1]) * float(np.mean(counts))
    return round((float(kept_state[-1]) + saved) / pp)
