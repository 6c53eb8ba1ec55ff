"""Configurations made to fit in memory, and why the others do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.stages import BodyCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.policy import has_regions
from stagewright.planning.advice import misses_memory
from stagewright.planning.candidate import (
    Candidate,
    Choice,
    fastest_partition,
    in_flight,
    make_candidate,
    make_plan,
    make_program,
    saved_counts,
    with_cuts,
    within_memory,
)
from stagewright.planning.found import Excluded
from stagewright.planning.host_optimizer import (
    HostOptimizer,
    host_excess_bytes,
    may_use_host,
    misses_host,
    saving_with_hosts,
    steps_once,
    ways_on_hosts,
)
from stagewright.planning.job import Job
from stagewright.planning.least_memory import tightest
from stagewright.planning.partition import MemoryBudget, has_partition
from stagewright.planning.plan import Plan
from stagewright.planning.predict import run_timeline
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import format_bytes

Recompute = Literal["auto", "none", "full", "model"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

_MOST_FRAGMENTS = 0.15
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


@dataclass
class Fitting:
    """The memory side of one search.

    * `excluded`: configurations that are no plans;
    * `on_host`: those that lack memory, with the optimizer on the host: to be tried too, once.
    """

    reference: ModelReference
    cluster: Cluster
    job: Job
    recompute: Recompute | None
    offload: bool
    host_optimizer: HostOptimizer
    thorough: bool = False
    """Whether to look longer for what runs again, which takes seconds a rank."""
    excluded: list[Excluded] = field(default_factory=list)
    on_host: list[Choice] = field(default_factory=list)
    _tried_on_host: set[Choice] = field(default_factory=set)
    _misses: list[Candidate] = field(default_factory=list)
    _host_misses: list[tuple[int, Choice]] = field(default_factory=list)
    _roughly_missed: list[tuple[int, Choice]] = field(default_factory=list)
    _too_many_stages: list[PlanError] = field(default_factory=list)

    def exclude(self, choice: Choice, reason: str, missing: int | None = None) -> None:
        self.excluded.append(Excluded.of(choice, reason, missing))

    def may_fit(self, choices: Iterable[Choice], body: BodyCosts, scale: float) -> list[Choice]:
        """Of each choice, itself if it may fit, or else with the host's memory if that may; saved values are `scale` times
        those of `body`."""
        found = []
        for choice in choices:
            ways = [choice, *self._with_host(choice)]
            found += [way for way in ways if self._may_fit(way, body, scale)][:1]
        return found

    def holds_one(self, choices: Iterable[Choice], body: BodyCosts, scale: float) -> bool:
        """Whether some choice has room for the state and all that one microbatch saves, `scale` times that of `body`."""
        limit = float(self.job.usable_bytes(self.cluster.device))
        precision = self.job.precision
        for choice in choices:
            counts = [min(count, 1) * scale for count in in_flight(make_program(choice))]
            budget = MemoryBudget([limit] * len(counts), counts, choice.state_share(precision))
            with suppress(PlanError):
                if has_partition(body, len(counts), budget):
                    return True
        return False

    def plan(
        self,
        choice: Choice,
        body: BodyCosts,
        start: Sequence[int],
        saves: bool,
        below_s: float,
        tight: bool = False,
    ) -> Plan | None:
        """The plan of `choice` that leaves room for what the allocator loses; if there is none, why is noted.

        Args:
            start: the fastest cuts.
            saves: whether it may recompute or offload, which takes long to work out and only pays for what could be the
                fastest.
            below_s: steps that save and take as long or longer are of no use.
            tight: whether to look for the cuts that take least memory where the others take too much.
        """
        counts = _least_counts(choice, body)
        if not saves and not tight and not self._partition_fits(choice, body, counts, kept=True):
            self._try_host(choice)
            return None
        limit = self.job.usable_bytes(self.cluster.device)
        fastest = with_cuts(body, choice, start, self.cluster, self.job)
        lost = 0  # to fragmentation, which only the replay of the allocator shows
        fragmented: list[Candidate] = []
        while lost <= _MOST_FRAGMENTS * limit:
            within = self.job.model_copy(update={"memory_limit": limit - lost}) if lost else self.job
            candidate = self._best_that_fits(fastest.for_job(within), body, saves, below_s)
            if tight:
                candidate = tightest(candidate, body)
            is_last = (
                candidate.excess_bytes > 0
            )  # less is not to be had; it may be little enough with what is lost
            if is_last and fragmented and not (tight and candidate.for_job(self.job).excess_bytes <= 0):
                break
            if is_last and not fragmented:
                self._misses.append(candidate)
                missing = candidate.excess_bytes
                self.exclude(choice, f"lacks {format_bytes(missing)} of memory a device", missing)
                return None
            ways = ways_on_hosts(candidate, self.host_optimizer)
            lacking = [host_excess_bytes(one.line) for one in ways]
            if (missing := min(lacking)) > 0:
                self._host_misses.append((missing, choice))
                self.exclude(choice, f"lacks {format_bytes(missing)} of memory on a host", missing)
                return None
            for one in itertools.compress(ways, (excess <= 0 for excess in lacking)):
                found = make_plan(one, body, self.reference)
                missing = found.predictions.reserved_peak_bytes - limit
                if missing <= 0:
                    return found.model_copy(update={"job": self.job})
            lost += max(missing, limit // 25)
            fragmented.append(replace(candidate, excess_bytes=missing))
            if is_last:
                break
        least = min(fragmented, key=lambda one: one.excess_bytes)
        self._misses.append(least)
        reason = f"lacks {format_bytes(least.excess_bytes)} of memory a device, lost to fragmentation"
        self.exclude(choice, reason, least.excess_bytes)
        return None

    def refined(self, choice: Choice, body: BodyCosts, start: Sequence[int]) -> Plan | None:
        """The plan of `choice` after a longer look at what is recomputed; if there is none, nothing is noted."""
        again = replace(
            self, thorough=True, excluded=[], on_host=[], _misses=[], _host_misses=[], _roughly_missed=[],
            _too_many_stages=[],
        )  # fmt: skip
        return again.plan(choice, body, start, saves=True, below_s=math.inf)

    def last_resort(self, body_of: Callable[[Choice], BodyCosts]) -> Plan | None:
        """Where nothing has fitted: the plan of the configuration that misses memory by least, after a longer look at what
        may be recomputed, or with all of it recomputed and with the cuts that take least memory; None if that is too much
        still.

        Args:
            body_of: the costs of a choice, one that was never worked out too.
        """
        if not self._misses and self._roughly_missed:
            _, choice = min(self._roughly_missed, key=lambda miss: miss[0])
            self._misses.append(make_candidate(body_of(choice), choice, self.cluster, self.job))
        if not self._misses:
            return None
        nearest = min(self._misses, key=lambda miss: miss.excess_bytes)
        choice, body = nearest.choice, body_of(nearest.choice)
        if self.recompute == "auto":
            found = self.refined(choice, body, fastest_partition(body, choice, self.cluster)[0])
            if found is not None:
                return found
            choice = replace(choice, recompute=True)
        start = fastest_partition(body, choice, self.cluster)[0]
        return self.plan(choice, body, start, saves=False, below_s=math.inf, tight=True)

    def nothing_fits(self) -> PlanError:
        """Why no choice became a plan, not even the last resort."""
        if self._host_misses and (self.host_optimizer == "always" or not self._misses):
            missing, choice = min(self._host_misses, key=lambda miss: miss[0])
            return misses_host(choice, missing, self.host_optimizer)
        if self._misses:
            return misses_memory(min(self._misses, key=lambda miss: miss.excess_bytes), self.job)
        return self._too_many_stages[0]

    def _with_host(self, choice: Choice) -> list[Choice]:
        """`choice` with the optimizer on the host, if that is one more way to try."""
        allowed = self.host_optimizer == "auto" and not choice.host_optimizer and may_use_host(self.cluster)
        return [replace(choice, host_optimizer=True)] if allowed and steps_once(choice) else []

    def _try_host(self, choice: Choice) -> None:
        ways = [way for way in self._with_host(choice) if way not in self._tried_on_host]
        self._tried_on_host.update(ways)
        self.on_host += ways

    def _may_fit(self, choice: Choice, body: BodyCosts, scale: float) -> bool:
        """Whether state and saved values alone fit in some partition; where these may be recomputed, the state."""
        recomputes = self.recompute == "auto" or choice.recompute or choice.as_model
        saved = [0.0 if recomputes else count for count in saved_counts(make_program(choice), body)]
        return self._partition_fits(choice, body, [count * scale for count in saved])

    def _partition_fits(
        self, choice: Choice, body: BodyCosts, counts: Sequence[float], kept: bool = False
    ) -> bool:
        """Whether some partition keeps the state and so many sets of saved values per stage, which are all there are if
        `kept`; if none does, why is noted."""
        limit = self.job.usable_bytes(self.cluster.device)
        share = choice.state_share(self.job.precision)
        budget = MemoryBudget([float(limit)] * len(counts), counts, share)
        try:
            if has_partition(body, len(counts), budget):
                return True
        except PlanError as error:
            self._too_many_stages.append(error)
            self.exclude(choice, str(error))
            return False
        least = _least_bytes(body, counts, share)
        self._roughly_missed.append((least, choice))
        if least > limit:
            which = (
                ", and cannot be the fastest if it gives any up" if self.recompute == "auto" and kept else ""
            )
            reason = f"needs {format_bytes(least)} a device or more, of {format_bytes(limit)}{which}"
            self.exclude(choice, reason, least - limit)
        else:
            self.exclude(choice, f"no partition keeps every device within {format_bytes(limit)}")
        return False

    def _best_that_fits(self, fastest: Candidate, body: BodyCosts, saves: bool, below_s: float) -> Candidate:
        """The fastest partition, if it fits; else one within memory or one that saves, whichever is faster."""
        if fastest.excess_bytes <= 0:
            return fastest
        self._try_host(fastest.choice)
        kept = within_memory(fastest, body)
        if not saves:
            return kept
        saving = saving_with_hosts(
            [fastest, kept],
            body,
            self.host_optimizer,
            offload=self.offload,
            below_s=below_s,
            thorough=self.thorough,
        )
        fitting = [one for one in (kept, saving) if one is not None and one.excess_bytes <= 0]
        return min(fitting, key=lambda one: run_timeline(one.line).makespan_s, default=kept)


def _least_counts(choice: Choice, body: BodyCosts) -> list[float]:
    """Of how many microbatches each stage holds all that is saved, at the least: of none where it keeps what the model's
    own code keeps."""
    counts = saved_counts(make_program(choice), body)
    return [0.0] * len(counts) if choice.as_model else counts


def _least_bytes(body: BodyCosts, counts: Sequence[float], state_share: float) -> int:
    """Bytes of the fullest rank if what it keeps of the state, and saved values, could be shared out evenly."""
    saved = float(body.saved_bytes[-1]) * float(np.mean(counts))
    return round((state_share * float(body.state_bytes[-1]) + saved) / len(counts))
