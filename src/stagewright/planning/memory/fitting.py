"""Configurations under our own runtime made to fit in memory, and why the others do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.policy import has_regions
from stagewright.planning.advice import misses_memory
from stagewright.planning.assignment.device_order import usable_bytes_of_ranks
from stagewright.planning.candidate import (
    Candidate,
    Choice,
    fastest_partition,
    make_candidate,
    make_plan,
    make_program,
    saved_counts,
    takes_longer,
    with_cuts,
    within_memory,
)
from stagewright.planning.found import Excluded
from stagewright.planning.job import Job
from stagewright.planning.memory.host_optimizer import (
    host_excess_bytes,
    may_use_host,
    misses_host,
    saving_with_hosts,
    steps_once,
    ways_on_hosts,
)
from stagewright.planning.memory.least_memory import tightest
from stagewright.planning.partition.solver import MemoryBudget, has_partition
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.pipeline import bodies_of
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.space import HostOptimizer, Recompute
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_bytes

_MOST_FRAGMENTS = 0.3
"""A configuration that loses more than this of its memory to fragmentation is no plan."""


def recompute_of(asked: Recompute | None, graph: OperatorGraph) -> Recompute:
    """What `asked` means for a model; None is what the model's own code says, and ``auto`` where it says nothing.

    Raises:
        InputError: ``model`` of a model that checkpoints nothing.
    """
    if asked == "model" and not has_regions(graph):
        raise InputError(
            f"recompute 'model' recomputes what the model's own code checkpoints, and '{graph.name}' calls "
            "torch.utils.checkpoint nowhere: use auto, none or full"
        )
    return asked or ("model" if has_regions(graph) else "auto")


@dataclass(frozen=True)
class Partitioned:
    """A choice on the cluster as its ranks number it, and the cuts of its fastest partition."""

    choice: Choice
    body: RangeCosts
    cluster: Cluster
    cuts: tuple[int, ...]
    saves: bool
    """Whether stages may recompute as much as memory asks for."""
    offload: bool = False
    """Whether they may then offload, too."""


@dataclass
class Fitting:
    """The memory side of one search; `excluded` are configurations that are no plans."""

    reference: ModelReference
    job: Job
    host_optimizer: HostOptimizer
    thorough: bool = False
    """Whether to look longer for what runs again, which takes seconds a rank."""
    excluded: list[Excluded] = field(default_factory=list)
    on_host: list[Choice] = field(default_factory=list)
    """What lacks memory, with the optimizer on the host: to be tried too, once."""
    num_bounded: int = 0
    """Configurations that are known to be too slow."""
    lost_share: float = 0.0
    """Of memory, what the plans so far lost to fragmentation: the next ones are tried with as much left free first."""
    left_free: dict[int, int] = field(default_factory=dict)
    """Bytes of a device that plans which may save leave free for what the allocator loses, by identity."""
    _tried_on_host: set[Choice] = field(default_factory=set)
    _misses: list[tuple[Candidate, Partitioned]] = field(default_factory=list)
    _host_misses: list[tuple[int, Choice]] = field(default_factory=list)
    _roughly_missed: list[tuple[int, Partitioned]] = field(default_factory=list)

    def exclude(self, choice: Choice, reason: str, missing: int | None = None) -> None:
        self.excluded.append(Excluded.of(choice, reason, missing))

    def try_on_host(self, choice: Choice, cluster: Cluster) -> None:
        """`choice` with the optimizer on the host, if that is one more way to try."""
        there = replace(choice, host_optimizer=True)
        allowed = self.host_optimizer == "auto" and not choice.host_optimizer and may_use_host(cluster)
        if allowed and there not in self._tried_on_host and steps_once(choice):
            self._tried_on_host.add(there)
            self.on_host.append(there)

    def plan(
        self,
        one: Partitioned,
        saves: bool,
        below_s: float = math.inf,
        longest_s: float = math.inf,
        tight: bool = False,
        left_free: int | None = None,
    ) -> Plan | None:
        """The plan of a choice that leaves room for what the allocator loses; if there is none, why is noted.

        Args:
            saves: whether it may recompute or offload, which takes long to work out and only pays for what could be the
                fastest.
            below_s: steps that save and take as long or longer are of no use.
            longest_s: nor are any steps that take as long.
            tight: whether to look for the cuts that take least memory where the others take too much.
            left_free: bytes of a device that are left free; by default as many as it takes.
        """
        choice, body = one.choice, one.body
        if takes_longer(body, choice, one.cuts, one.cluster, self.job, longest_s):
            self.num_bounded += 1
            return None
        if not saves and not tight and not self.has_partition(one, kept=True):
            self.try_on_host(choice, one.cluster)
            return None
        fastest = with_cuts(body, choice, one.cuts, one.cluster, self.job)
        limit = min(fastest.line.usable_bytes(rank) for rank in range(choice.pp))
        # What is lost to fragmentation only the replay of the allocator shows.
        lost = 0 if fastest.excess_bytes <= 0 or tight else int(self.lost_share * limit)
        expected, fragmented = lost, list[Candidate]()
        if left_free is not None:
            lost, expected = left_free, 0
        while lost <= _MOST_FRAGMENTS * limit:
            candidate = self._best_that_fits(fastest.with_headroom(lost), one, saves, below_s)
            if tight:
                candidate = tightest(candidate, body)
            is_last = (
                candidate.excess_bytes > 0
            )  # less is not to be had; it may be little enough with what is lost
            if is_last and expected:
                lost = expected = 0
                continue
            if is_last and fragmented and not (tight and candidate.with_headroom(0).excess_bytes <= 0):
                break
            if is_last and not fragmented:
                self._misses.append((candidate, one))
                missing = candidate.excess_bytes
                self.exclude(choice, f"lacks {format_bytes(missing)} of memory a device", missing)
                return None
            ways = ways_on_hosts(candidate, self.host_optimizer)
            lacking = [host_excess_bytes(way.line) for way in ways]
            if (missing := min(lacking)) > 0:
                self._host_misses.append((missing, choice))
                self.exclude(choice, f"lacks {format_bytes(missing)} of memory on a host", missing)
                return None
            seconds = math.inf
            for way in itertools.compress(ways, (excess <= 0 for excess in lacking)):
                plan = make_plan(way, body, self.reference)
                seconds = min(seconds, plan.predictions.step_seconds)
                missing = max(
                    rank.reserved_peak_bytes - way.line.usable_bytes(rank.rank) - lost
                    for rank in plan.predictions.ranks
                )
                if missing <= 0:
                    if saves:
                        self.lost_share = lost / limit
                        self.left_free[id(plan)] = lost
                    return plan
            if seconds >= longest_s:  # with less memory it takes no less
                self.num_bounded += 1
                return None
            lost, expected = lost + max(missing, limit // 25), 0
            fragmented.append(replace(candidate.with_headroom(0), excess_bytes=missing))
            if is_last or left_free is not None:
                break
        least = min(fragmented, key=lambda short: short.excess_bytes)
        self._misses.append((least, one))
        reason = f"lacks {format_bytes(least.excess_bytes)} of memory a device, lost to fragmentation"
        self.exclude(choice, reason, least.excess_bytes)
        return None

    def refined(self, one: Partitioned) -> Plan | None:
        """The plan of a choice after a longer look at what is recomputed; if there is none, nothing is noted."""
        return Fitting(self.reference, self.job, self.host_optimizer, thorough=True).plan(one, True)

    def afresh(self, one: Partitioned, below_s: float, left_free: int | None = None) -> Plan | None:
        """As `plan`, as if it were the first; None where it takes `below_s` or longer. Only what it leaves free is noted."""
        other = Fitting(self.reference, self.job, self.host_optimizer)
        found = other.plan(one, True, below_s, below_s, left_free=left_free)
        if found is None or found.predictions.step_seconds >= below_s:
            return None
        self.left_free |= other.left_free
        return found

    def last_resort(self, nearest: Partitioned | None = None) -> Plan | None:
        """Where nothing has fitted: the plan of the configuration that misses memory by least, after a longer look at what
        may be recomputed, or with all of it recomputed and with the cuts that take least memory; None if that is too much
        still. `nearest` is looked at where nothing else was."""
        if not self._misses and self._roughly_missed:
            _, nearest = min(self._roughly_missed, key=lambda miss: miss[0])
        if not self._misses and nearest is not None:
            one = nearest
            self._misses.append((make_candidate(one.body, one.choice, one.cluster, self.job), one))
        if not self._misses:
            return None
        _, one = min(self._misses, key=lambda miss: miss[0].excess_bytes)
        if one.saves:
            if (found := self.refined(one)) is not None:
                return found
            one = replace(one, choice=replace(one.choice, recompute="full"))
        start, _ = fastest_partition(one.body, one.choice, one.cluster)
        return self.plan(replace(one, cuts=start), saves=False, tight=True)

    def nothing_fits(self) -> PlanError | None:
        """Why no choice became a plan, not even the last resort; None where none was ever worked out."""
        if self._host_misses and (self.host_optimizer == "always" or not self._misses):
            missing, choice = min(self._host_misses, key=lambda miss: miss[0])
            return misses_host(choice, missing, self.host_optimizer)
        if self._misses:
            return misses_memory(
                min((one for one, _ in self._misses), key=lambda miss: miss.excess_bytes), self.job
            )
        return None

    def has_partition(self, one: Partitioned, kept: bool = False) -> bool:
        """Whether some partition keeps the state and the values that must be saved, which are all there are if `kept`; if
        none does, why is noted."""
        choice, body = one.choice, one.body
        program = make_program(choice)
        counts = saved_counts(program, body)
        if choice.recompute == "model" or (not kept and (one.saves or choice.recompute == "full")):
            counts = [0.0] * len(counts)
        share = choice.state_share(self.job.precision)
        limits = usable_bytes_of_ranks(self.job, one.cluster, choice.pp)
        ranks = program.placement.rank_of_stage
        bodies = bodies_of(body, one.cluster, choice.pp, choice.num_holders * choice.tp)
        budget = MemoryBudget([limits[rank] for rank in ranks], counts, share)
        if has_partition([bodies[rank] for rank in ranks], budget):
            return True
        limit, least = min(limits), _least_bytes(body, counts, share, choice.pp)
        self._roughly_missed.append((least, one))
        if least > limit:
            which = ", and cannot be the fastest if it gives any up" if one.saves and kept else ""
            reason = f"needs {format_bytes(least)} a device or more, of {format_bytes(limit)}{which}"
            self.exclude(choice, reason, least - limit)
        else:
            self.exclude(choice, f"no partition keeps every device within {format_bytes(limit)}")
        return False

    def _best_that_fits(self, fastest: Candidate, one: Partitioned, saves: bool, below_s: float) -> Candidate:
        """The fastest partition, if it fits; else one within memory or one that saves, whichever is faster."""
        if fastest.excess_bytes <= 0:
            return fastest
        self.try_on_host(replace(fastest.choice, headroom=0), fastest.line.cluster)
        kept = within_memory(fastest, one.body)
        if not saves:
            return kept
        saving = saving_with_hosts(
            [fastest, kept],
            one.body,
            self.host_optimizer,
            offload=one.offload,
            below_s=below_s,
            thorough=self.thorough,
        )
        fitting = [each for each in (kept, saving) if each is not None and each.excess_bytes <= 0]
        return min(fitting, key=lambda each: run_timeline(each.line).makespan_s, default=kept)


def _least_bytes(body: RangeCosts, counts: Sequence[float], state_share: float, pp: int) -> int:
    """Bytes of the fullest rank if what it keeps of the state, and saved values, could be spread evenly."""
    saved = float(body.saved_bytes[-1]) * float(np.mean(counts))
    return round((state_share * float(body.state_bytes[-1]) + saved) / pp)
