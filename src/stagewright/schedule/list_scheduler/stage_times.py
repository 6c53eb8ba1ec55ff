"""Conversion of stage times for the compiled schedulers, and of their orders to programs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.schedule.action import Kind
from stagewright.schedule.builders.pieces import numbered
from stagewright.schedule.list_scheduler.terms import Order, Stages
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program

KINDS = (Kind.F, Kind.I, Kind.W)
"""Kinds of the actions `FORWARD`, `INPUT_GRAD` and `WEIGHT_GRAD`."""


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds and memory per stage, and seconds of a transfer over each edge ``s -> s + 1``.

    `saved` is the memory of a microbatch from forward to input gradient, `held` from there to its weight gradient, in any
    unit.
    """

    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    transfer_s: Floats
    saved: Floats
    held: Floats

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        transfer_s: float = 0.0,
        held: float = 0.5,
    ) -> StageTimes:
        """Return equal stages that save one unit of memory per microbatch."""
        ones = np.ones(num_stages)
        edges = transfer_s * np.ones(num_stages - 1)
        return cls(forward_s * ones, input_grad_s * ones, weight_grad_s * ones, edges, ones, held * ones)


def stages_of(placement: Placement, times: StageTimes, memory_limit: float | Floats) -> Stages:
    """Return the costs of the stages of `placement` for the kernels."""
    rank = np.array(placement.rank_of_stage, np.int64)
    saved = np.asarray(times.saved, np.float64)
    edge_s = np.where(rank[1:] != rank[:-1], times.transfer_s, 0.0)
    return Stages(
        start=np.arange(len(rank)),
        rank=rank,
        forward=np.asarray(times.forward_s, np.float64),
        input_grad=np.asarray(times.input_grad_s, np.float64),
        weight_grad=np.asarray(times.weight_grad_s, np.float64),
        transfer=np.concatenate([[0.0], edge_s]),
        saved=saved,
        held=np.asarray(times.held, np.float64),
        saved_later=np.array([saved[s + 1 :][rank[s + 1 :] == rank[s]].sum() for s in range(len(rank))]),
        limit=np.broadcast_to(np.asarray(memory_limit, np.float64), placement.num_ranks).copy(),
        members=np.argsort(rank, kind="stable"),
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rank))]),
    )


def program_of(
    name: str, placement: Placement, num_microbatches: int, order: Order, offsets: Ints
) -> Program:
    """Return the program of an `order`; the k-th occurrence of a kind of action on a stage is for microbatch k."""
    kinds = (KINDS[index] for index in order.kinds)
    steps = [*zip(kinds, map(int, order.stages), strict=True)]
    bounds = pairwise((3 * num_microbatches * offsets).tolist())
    return Program(
        name,
        placement,
        num_microbatches,
        tuple(tuple(numbered(steps[begin:end], num_microbatches)) for begin, end in bounds),
    )
