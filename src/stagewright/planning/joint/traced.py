"""Layer costs of a traced model for the joint search, and cuts and programs of the model from its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.cluster import Cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.partition.ranges import Recomputable
from stagewright.planning.partition.solver import narrowest_of_each
from stagewright.planning.partition.stage_terms import known_ranges
from stagewright.planning.prediction.transfers import lane_seconds
from stagewright.schedule import Action, Kind, Program

_PIECES_PER_RANK = 12
_FEWEST_PIECES = 48
_LARGE_MESSAGE = 2**26
_RECOMPUTING_TABLES = 12
"""Number of equal steps in which the recomputed fraction of a rank is searched."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Figures from a plan of a configuration: seconds that every action of a stage takes besides its operators, bytes that a
    rank may fill with state and saved values, and the state that it keeps, as prefix sums."""

    overhead_s: float
    memory_bytes: Sequence[float]
    state_bytes: Floats


@dataclass(frozen=True)
class LinkModel:
    """The links between the ranks of a pipeline on a cluster; `width` devices hold every stage."""

    cluster: Cluster
    num_ranks: int
    width: int
    uses_lanes: bool = False
    """Whether receives are posted right before their use."""

    def link(self) -> tuple[float, float]:
        """Return latency in seconds and bytes per second of the slowest link between neighbouring ranks.

        Ignores: that other pairs of ranks may be further apart.
        """
        seconds = lane_seconds if self.uses_lanes else Cluster.blocks_seconds
        latency, slowest = 0.0, 0.0
        for rank in range(self.num_ranks):
            ends = rank * self.width, (rank + 1) % self.num_ranks * self.width
            least = seconds(self.cluster, 0, *ends, self.width)
            most = seconds(self.cluster, _LARGE_MESSAGE, *ends, self.width)
            latency, slowest = max(latency, least), max(slowest, most - least)
        return latency, _LARGE_MESSAGE / slowest if slowest else np.inf


def piece_ends(model_costs: RangeCosts, num_ranks: int) -> Ints:
    """Return the cut indices between pieces, including both ends: the legal cut with the smallest boundary in every interval
    of about equal seconds."""
    wanted = max(_FEWEST_PIECES, _PIECES_PER_RANK * num_ranks)
    intervals = np.floor(model_costs.seconds[model_costs.legal_cuts] / model_costs.seconds[-1] * wanted)
    return np.array([0, *narrowest_of_each(model_costs, intervals), model_costs.size], np.int64)


def problem_of(
    model_costs: RangeCosts,
    ends: Ints,
    num_microbatches: int,
    link_model: LinkModel,
    calibration: Calibration,
    *,
    saves: bool = False,
) -> JointProblem:
    """Return the problem whose layers are the pieces of `model_costs` between `ends`; with recomputing tables if `saves`."""
    forward, weight_grad = (
        np.diff(model_costs.forward_seconds[ends]),
        np.diff(model_costs.weight_grad_seconds[ends]),
    )
    input_grad = np.maximum(np.diff(model_costs.seconds[ends]) - forward - weight_grad, 0.0)
    kept = LayerTable.of(
        forward,
        input_grad,
        weight_grad,
        parameter_bytes=np.diff(calibration.state_bytes[ends]),
        saved_bytes=np.diff(model_costs.saved_bytes[ends]),
        boundary_bytes=model_costs.boundary_bytes[ends[1:]] / 2,
    )
    latency, bandwidth = link_model.link()
    return JointProblem.of(
        kept, link_model.num_ranks, num_microbatches,
        memory_bytes=calibration.memory_bytes,
        latency_s=latency, bytes_per_s=bandwidth, overhead_s=calibration.overhead_s,
        receivers_wait=link_model.uses_lanes,
        recomputing=tuple(_recomputing(kept, known_ranges(model_costs).recomputable, ends)) if saves else (),
    )  # fmt: skip


def _recomputing(kept: LayerTable, recomputable: Recomputable, ends: Ints) -> Iterator[LayerTable]:
    """Yield `kept` on ranks that recompute more and more, in equal steps, of all that is recomputable, the cheapest first.

    A rank that must free some bytes recomputes everything up to one price in seconds per byte: nothing else frees as many
    bytes in less time. Its backwards are not split: recomputed values would be kept between I and W.

    Ignores: that values may also be offloaded, and that chains which share operators cost less together.
    """
    piece = np.searchsorted(ends, recomputable.place, side="right") - 1
    freed_bytes = np.cumsum(recomputable.num_bytes)
    for part in range(1, _RECOMPUTING_TABLES + 1):
        count = (
            int(np.searchsorted(freed_bytes, freed_bytes[-1] * part / _RECOMPUTING_TABLES * (1 - 1e-12))) + 1
            if len(freed_bytes)
            else 0
        )
        seconds, recomputed_bytes = (
            np.bincount(piece[:count], column[:count], kept.num_layers)
            for column in (recomputable.seconds, recomputable.num_bytes)
        )
        yield replace(
            kept,
            input_grad_s=kept.input_grad_s + kept.weight_grad_s + seconds,
            weight_grad_s=np.zeros(kept.num_layers),
            saved_bytes=np.maximum(kept.saved_bytes - recomputed_bytes, 0.0),
            held_bytes=np.zeros(kept.num_layers),
        )


def cuts_of(plan: JointPlan, ends: Ints) -> tuple[int, ...]:
    """Return the cut indices of the stages of `plan`."""
    return tuple(int(ends[cut]) for cut in plan.layout.cuts)


def without_splits(plan: JointPlan) -> JointPlan:
    """Return `plan` with whole backwards on the ranks that recompute; their weight gradients take no time of their own."""
    if not plan.layout.recompute:
        return plan
    whole = {Kind.I: Kind.B}
    ranks = [
        [replace(a, kind=whole.get(a.kind, a.kind)) for a in actions if a.kind is not Kind.W]
        if is_recomputing
        else actions
        for actions, is_recomputing in zip(plan.program.ranks, plan.layout.recompute, strict=True)
    ]
    return judged(plan.name, plan.problem, plan.layout, plan.program.with_ranks(ranks), plan.policy)


def with_backwards(plan: JointPlan) -> Program:
    """Return the program of `plan` with a whole backward wherever a weight gradient follows its input gradient and no stage
    waits for the latter: one function is faster than two, and frees memory sooner."""
    program, timeline = plan.program, plan.timeline
    encoded, transfer_s = timeline.encoded, plan.problem.transfer_s
    begins = {
        (action.stage, action.microbatch): float(timeline.start_s[index])
        for index, action in enumerate(program)
        if action.kind in (Kind.I, Kind.B)
    }
    first_layer = (0, *plan.layout.cuts)

    def joins(index: int, action: Action, following: Action) -> bool:
        if action.kind is not Kind.I or following != Action(Kind.W, action.stage, action.microbatch):
            return False
        wanted = begins.get((action.stage - 1, action.microbatch), np.inf)
        return float(timeline.end_s[index + 1]) + transfer_s[first_layer[action.stage]] <= wanted

    ranks = []
    for rank, actions in enumerate(program.ranks):
        base, merged, at = encoded.rank_slice(rank).start, [], 0
        while at < len(actions):
            fuses = at + 1 < len(actions) and joins(base + at, actions[at], actions[at + 1])
            action = actions[at]
            merged.append(Action(Kind.B, action.stage, action.microbatch) if fuses else action)
            at += 2 if fuses else 1
        ranks.append(merged)
    return program.with_ranks(ranks)
