"""Layer costs for the joint search from a traced model, and cuts and programs of the model from its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.arrays import Ints
from stagewright.cluster import Cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import LayerTable, Problem
from stagewright.planning.partition.line import known_ranges
from stagewright.planning.partition.ranges import Givable
from stagewright.planning.partition.solver import narrowest_of_each
from stagewright.planning.prediction.transfers import lane_seconds
from stagewright.schedule import Action, Kind, Program

_PIECES_PER_RANK = 12
_FEWEST_PIECES = 48
_LARGE_MESSAGE = 2**26
_THRIFTY_TABLES = 12
"""How much a rank recomputes is searched in steps of one part in so many."""


@dataclass(frozen=True, eq=False)
class Known:
    """What a plan of a configuration has shown: seconds that every computation of a stage takes beside its operators,
    bytes a rank may fill with state and saved values, and the part of the state that it keeps."""

    overhead_s: float
    memory_bytes: Sequence[float]
    state_share: float


@dataclass(frozen=True)
class Wiring:
    """How the ranks of a pipeline lie on a cluster: `width` devices hold every stage."""

    cluster: Cluster
    num_ranks: int
    width: int
    uses_lanes: bool = False
    """Whether receives are posted right before their use."""

    def link(self) -> tuple[float, float]:
        """Latency in seconds and bytes per second of the slowest link between ranks that follow each other.

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


def piece_ends(body: RangeCosts, num_ranks: int) -> Ints:
    """Positions at which the body is taken apart, its two ends among them: in every stretch of about equal
    seconds the legal cut that least crosses."""
    wanted = max(_FEWEST_PIECES, _PIECES_PER_RANK * num_ranks)
    stretches = np.floor(body.seconds[body.legal_cuts] / body.seconds[-1] * wanted)
    return np.array([0, *narrowest_of_each(body, stretches), body.size], np.int64)


def problem_of(
    body: RangeCosts, ends: Ints, num_microbatches: int, wiring: Wiring, known: Known, *, saves: bool = False
) -> Problem:
    """The pieces of `body` between `ends` as layers, and with `saves` those of ranks that recompute."""
    forward, weight_grad = np.diff(body.forward_seconds[ends]), np.diff(body.weight_grad_seconds[ends])
    input_grad = np.maximum(np.diff(body.seconds[ends]) - forward - weight_grad, 0.0)
    kept = LayerTable.of(
        forward,
        input_grad,
        weight_grad,
        parameter_bytes=known.state_share * np.diff(body.state_bytes[ends]),
        saved_bytes=np.diff(body.saved_bytes[ends]),
        boundary_bytes=body.boundary_bytes[ends[1:]] / 2,
    )
    latency, bandwidth = wiring.link()
    return Problem.of(
        kept, wiring.num_ranks, num_microbatches,
        memory_bytes=known.memory_bytes,
        latency_s=latency, bytes_per_s=bandwidth, overhead_s=known.overhead_s,
        receivers_wait=wiring.uses_lanes,
        thrifty=tuple(_thrifty(kept, known_ranges(body).givable, ends)) if saves else (),
    )  # fmt: skip


def _thrifty(kept: LayerTable, given: Givable, ends: Ints) -> Iterator[LayerTable]:
    """`kept` on ranks that recompute one more equal part of all that may be recomputed each, the cheapest first.

    A rank that wants so many bytes back takes everything up to one price, in seconds per byte: nothing else gives as
    many bytes for less time. Its backwards are in one piece: between two pieces what was made again would be kept.

    Ignores: that values may also be offloaded, and that chains which share operators cost less together.
    """
    piece = np.searchsorted(ends, given.place, side="right") - 1
    have = np.cumsum(given.num_bytes)
    for part in range(1, _THRIFTY_TABLES + 1):
        count = (
            int(np.searchsorted(have, have[-1] * part / _THRIFTY_TABLES * (1 - 1e-12))) + 1
            if len(have)
            else 0
        )
        seconds, freed = (
            np.bincount(piece[:count], column[:count], kept.num_layers)
            for column in (given.seconds, given.num_bytes)
        )
        yield replace(
            kept,
            input_grad_s=kept.input_grad_s + kept.weight_grad_s + seconds,
            weight_grad_s=np.zeros(kept.num_layers),
            saved_bytes=np.maximum(kept.saved_bytes - freed, 0.0),
            held_bytes=np.zeros(kept.num_layers),
        )


def cuts_of(plan: JointPlan, ends: Ints) -> tuple[int, ...]:
    """Positions in the body at which the stages of `plan` are cut."""
    return tuple(int(ends[cut]) for cut in plan.layout.cuts)


def without_splits(plan: JointPlan) -> JointPlan:
    """`plan` with whole backwards on the ranks that make values again; their weight gradients take no time of their own."""
    if not plan.layout.thrift:
        return plan
    whole = {Kind.I: Kind.B}
    ranks = [
        [replace(a, kind=whole.get(a.kind, a.kind)) for a in actions if a.kind is not Kind.W]
        if thrift
        else actions
        for actions, thrift in zip(plan.program.ranks, plan.layout.thrift, strict=True)
    ]
    return judged(plan.name, plan.problem, plan.layout, plan.program.with_ranks(ranks), plan.policy)


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
