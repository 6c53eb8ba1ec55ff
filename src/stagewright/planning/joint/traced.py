"""Layer costs for the joint search from a traced model, and cuts and programs of the model from its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.cluster import Cluster
from stagewright.estimation.stages import BodyCosts
from stagewright.planning.joint.plan import JointPlan
from stagewright.planning.joint.problem import LayerTable, Problem
from stagewright.planning.joint.terms import Ints
from stagewright.schedule import Action, Kind, Program

_PIECES_PER_RANK = 12
_FEWEST_PIECES = 48
_LARGE_MESSAGE = 2**26


@dataclass(frozen=True, eq=False)
class Known:
    """What a plan of a configuration has shown: seconds that every computation of a stage takes beside its
    operators, bytes a rank may fill with state and saved values, the part of the state that it keeps, the part of
    the saved values that stays in memory, and the part of a forward that is run again for the others."""

    overhead_s: float
    memory_bytes: Sequence[float]
    state_share: float
    kept_share: float = 1.0
    remade_share: float = 0.0


@dataclass(frozen=True)
class Wiring:
    """How the ranks of a pipeline lie on a cluster: `width` devices hold every stage."""

    cluster: Cluster
    num_ranks: int
    width: int

    def link(self) -> tuple[float, float]:
        """Latency in seconds and bytes per second of the slowest link between ranks that follow each other.

        Ignores: that other pairs of ranks may be further apart.
        """
        latency, slowest = 0.0, 0.0
        for rank in range(self.num_ranks):
            ends = rank * self.width, (rank + 1) % self.num_ranks * self.width
            least = self.cluster.point_to_point_seconds(0, *ends)
            most = self.cluster.point_to_point_seconds(_LARGE_MESSAGE, *ends)
            latency, slowest = max(latency, least), max(slowest, most - least)
        return latency, _LARGE_MESSAGE / slowest if slowest else np.inf


def piece_ends(body: BodyCosts, num_ranks: int) -> Ints:
    """Positions at which the body is taken apart, its two ends among them: in every stretch of about equal
    seconds the legal cut that least crosses."""
    legal, width = body.legal_cuts, body.boundary_bytes
    wanted = max(_FEWEST_PIECES, _PIECES_PER_RANK * num_ranks)
    stretch = np.floor(body.seconds[legal] / body.seconds[-1] * wanted)
    narrowest: dict[float, int] = {}
    for cut, key in zip(legal.tolist(), stretch.tolist(), strict=True):
        if key not in narrowest or width[cut] < width[narrowest[key]]:
            narrowest[key] = cut
    return np.array([0, *sorted(narrowest.values()), body.size], np.int64)


def problem_of(body: BodyCosts, ends: Ints, num_microbatches: int, wiring: Wiring, known: Known) -> Problem:
    """The pieces of `body` between `ends` as layers."""
    forward, weight_grad = np.diff(body.forward_seconds[ends]), np.diff(body.weight_grad_seconds[ends])
    input_grad = np.maximum(np.diff(body.seconds[ends]) - forward - weight_grad, 0.0)
    table = LayerTable.of(
        forward,
        input_grad + known.remade_share * forward,
        weight_grad,
        parameter_bytes=known.state_share * np.diff(body.state_bytes[ends]),
        saved_bytes=known.kept_share * np.diff(body.saved_bytes[ends]),
        boundary_bytes=body.boundary_bytes[ends[1:]] / 2,
    )
    latency, bandwidth = wiring.link()
    return Problem.of(
        table, wiring.num_ranks, num_microbatches,
        memory_bytes=known.memory_bytes,
        latency_s=latency, bytes_per_s=bandwidth, overhead_s=known.overhead_s,
    )  # fmt: skip


def cuts_of(plan: JointPlan, ends: Ints) -> tuple[int, ...]:
    """Positions in the body at which the stages of `plan` are cut."""
    return tuple(int(ends[cut]) for cut in plan.layout.cuts)


def with_backwards(plan: JointPlan) -> Program:
    """The program of `plan` with a backward in one piece wherever a weight gradient follows its input gradient and
    nobody waits for the latter: one function is faster than two, and frees what it has used sooner."""
    program, timeline = plan.program, plan.timeline
    encoded, hop = timeline.encoded, plan.problem.transfer_s
    begins = {
        (action.stage, action.microbatch): float(timeline.start_s[index])
        for index, action in enumerate(program)
        if action.kind in (Kind.I, Kind.B)
    }
    first_layer = (0, *plan.layout.cuts)

    def joins(index: int, one: Action, other: Action) -> bool:
        if one.kind is not Kind.I or other != Action(Kind.W, one.stage, one.microbatch):
            return False
        wanted = begins.get((one.stage - 1, one.microbatch), np.inf)
        return float(timeline.end_s[index + 1]) + hop[first_layer[one.stage]] <= wanted

    ranks = []
    for rank, actions in enumerate(program.ranks):
        base, made, at = encoded.rank_slice(rank).start, [], 0
        while at < len(actions):
            fuses = at + 1 < len(actions) and joins(base + at, actions[at], actions[at + 1])
            action = actions[at]
            made.append(Action(Kind.B, action.stage, action.microbatch) if fuses else action)
            at += 2 if fuses else 1
        ranks.append(made)
    return program.with_ranks(ranks)
