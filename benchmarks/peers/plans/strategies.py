"""Planners of other systems, each as it is published: which schedule, where the model is cut, what is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from peers.exact.cuts import exact
from peers.plans.blocks import at_blocks, even_cuts, timed_cuts
from peers.plans.choosers import knapsack
from peers.plans.units import by_units
from peers.plans.vpipe import suffix_cuts, with_suffixes
from stagewright.cluster import Cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.policy import RECOMPUTE_ALL
from stagewright.planning.candidate import (
    Candidate,
    candidate_of,
    fastest_fitted,
    fastest_partition,
    with_cuts,
)
from stagewright.planning.checkpointing.fit import Fitted, fit
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.partition.stage_ranges import StageRanges
from stagewright.planning.partition.stage_terms import corrected, known_ranges, terms_of
from stagewright.planning.prediction.regions import kept_policy
from stagewright.planning.prediction.staged_model import staged_model
from stagewright.schedule.in_flight import in_flight
from stagewright.schedule.lower import insert_recomputation

Make = Callable[[RangeCosts, Configuration, Cluster, Job], "Candidate | None"]


@dataclass(frozen=True)
class Strategy:
    """A planner: `make` gives the candidate it would choose for a configuration, or None if it finds none that fits.

    `asynchronous`: whether it steps without a flush, on several versions of the weights; such plans are predicted, not run.
    """

    name: str
    what: str
    schedule: str
    make: Make
    recompute: bool = False
    asynchronous: bool = False

    def candidate(
        self, model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
    ) -> Candidate | None:
        """What it makes of a configuration, whose schedule is the strategy's; without a plan that fits, None or a candidate
        that lacks memory.

        Raises:
            PlanError: the model cannot be cut into so many stages.
        """
        found = self.make(model_costs, replace(configuration, schedule=self.schedule), cluster, job)
        if found is None or not self.recompute or configuration.pp == 1:
            return found
        return _recomputed(found, model_costs)


def _recomputed(plain: Candidate, model_costs: RangeCosts) -> Candidate:
    """`plain` with stages recomputed at once from what enters them, where several microbatches are in flight.

    Source: Kim et al. 2020, "torchgpipe" (arXiv 2004.09910), which checkpoints all microbatches but the last.
    """
    before = plain.staged.program
    again = [stage for stage, count in enumerate(in_flight(before)) if count > 1]
    program = insert_recomputation(before, again)
    policies = [
        RECOMPUTE_ALL if stage in again else kept_policy(model_costs.graph)
        for stage in range(program.num_stages)
    ]
    cluster, job, configuration = plain.staged.cluster, plain.staged.job, plain.configuration
    staged = staged_model(model_costs, plain.cuts, program, cluster, job, configuration.num_holders, policies)
    named = tuple("recompute" if stage in again else "keep" for stage in range(program.num_stages))
    return replace(candidate_of(configuration, plain.cuts, staged), memory_policy=named)


def _even(model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job) -> Candidate:
    return with_cuts(model_costs, configuration, even_cuts(model_costs, configuration.pp), cluster, job)


def _timed(model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job) -> Candidate:
    cuts = timed_cuts(model_costs, known_ranges(model_costs), configuration.pp)
    return with_cuts(model_costs, configuration, cuts, cluster, job)


def _vpipe(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
) -> Candidate | None:
    start = _timed(model_costs, configuration, cluster, job)
    if start.excess_bytes <= 0:
        return start
    cuts = suffix_cuts(start, model_costs)
    moved = start if cuts == start.cuts else with_cuts(model_costs, configuration, cuts, cluster, job)
    return with_suffixes(moved, model_costs)


def _adapipe(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
) -> Candidate | None:
    start = _timed(model_costs, configuration, cluster, job)
    terms = terms_of(start.staged, model_costs, offload=False)
    leaves = corrected(
        start.staged,
        start.memories,
        StageRanges(at_blocks(model_costs, known_ranges(model_costs), configuration.pp), terms),
    )
    found = exact(leaves)
    if found is None:
        return None
    plain = (
        start if found.cuts == start.cuts else with_cuts(model_costs, configuration, found.cuts, cluster, job)
    )
    fitted = fit(
        plain.staged, model_costs, propose=lambda proposals, kept: by_units(proposals, kept, knapsack)
    )
    if not isinstance(fitted, Fitted):
        return None
    return replace(
        plain,
        staged=fitted.staged,
        memories=fitted.memories,
        excess_bytes=fitted.staged.missing_bytes(fitted.memories),
        memory_policy=fitted.memory_policy,
    )


def _own(
    model_costs: RangeCosts, configuration: Configuration, cluster: Cluster, job: Job
) -> Candidate | None:
    start = with_cuts(
        model_costs, configuration, fastest_partition(model_costs, configuration, cluster)[0], cluster, job
    )
    fitted = start if start.excess_bytes <= 0 else fastest_fitted([start], model_costs)
    return fitted if isinstance(fitted, Candidate) else None


STRATEGIES = {
    one.name: one
    for one in (
        Strategy("even", "1F1B, as many blocks for every stage, everything kept", "1f1b", _even),
        Strategy(
            "gpipe", "forwards, then backwards; as many blocks for every stage, all recomputed at once", "gpipe", _even,
            recompute=True,
        ),
        Strategy(
            "torchgpipe", "forwards, then backwards; blocks balanced by time, all recomputed at once", "gpipe", _timed,
            recompute=True,
        ),
        Strategy("adapipe", "1F1B; blocks, and values recomputed by a knapsack, for the least time", "1f1b", _adapipe),
        Strategy(
            "pipedream", "asynchronous 1F1B with weight versions; blocks balanced by time, everything kept", "pipedream",
            _timed, asynchronous=True,
        ),
        Strategy(
            "vpipe", "asynchronous 1F1B with weight versions; blocks exchanged, ends of stages recomputed", "pipedream",
            _vpipe, asynchronous=True,
        ),
        Strategy("own-1f1b", "Stagewright's cuts and savings under 1F1B, to compare with", "1f1b", _own),
        Strategy(
            "own-async", "Stagewright's cuts and savings under asynchronous 1F1B, to compare with", "pipedream", _own,
            asynchronous=True,
        ),
    )
}  # fmt: skip
