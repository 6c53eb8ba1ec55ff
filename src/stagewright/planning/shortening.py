"""Programs of many microbatches cut to as few as show every state of their memory."""

from __future__ import annotations

from functools import lru_cache

from stagewright.planning.sharding import sharded_like, without_sharding
from stagewright.schedule import Kind, Program, build
from stagewright.schedule.saving import insert_offloading, insert_recomputation

_PERIODIC = frozenset({"1f1b", "pipedream"})
"""Families in which, once every rank alternates between F and B, each microbatch repeats the state of the one before."""

_SAVING_KINDS = frozenset({Kind.R, Kind.OFFLOAD, Kind.FETCH})


@lru_cache(maxsize=64)
def built(name: str, num_ranks: int, num_microbatches: int) -> Program:
    """The computations of every rank, in order; kept, because all partitions of a search have the same."""
    return build(name, num_ranks, num_microbatches)


@lru_cache(maxsize=32)
def shortened(program: Program) -> Program:
    """The 1F1B program, with or without steps in between, of as many microbatches as show every state of its memory; other
    programs as they are."""
    enough = program.num_ranks + 4
    if program.name not in _PERIODIC or program.num_microbatches <= enough:
        return program
    saves = any(action.kind in _SAVING_KINDS for action in program)
    if saves and any(action.kind is Kind.GATHER for action in program):
        return program  # what is gathered when depends on the recomputations in between
    plain = without_sharding(_without_saving(program))
    if built(program.name, program.num_ranks, program.num_microbatches) != plain:
        return program
    short = sharded_like(program, built(program.name, program.num_ranks, enough))
    return _saving_like(program, short) if saves else short


def _without_saving(program: Program) -> Program:
    return program.with_ranks(
        (action for action in actions if action.kind not in _SAVING_KINDS) for actions in program.ranks
    )


def _saving_like(program: Program, other: Program) -> Program:
    """`other` with the recomputation and offloading that `program` has for the same stages."""
    stages = {
        kind: {action.stage for action in program if action.kind is kind} for kind in (Kind.R, Kind.OFFLOAD)
    }
    moved = insert_offloading(other, stages[Kind.OFFLOAD]) if stages[Kind.OFFLOAD] else other
    return insert_recomputation(moved, stages[Kind.R]) if stages[Kind.R] else moved
