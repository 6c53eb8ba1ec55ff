"""Programs of many microbatches cut to as few as show every state of their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce

from stagewright.planning.sharding import NUM_BUFFERS, SHARDING_KINDS, sharded_like
from stagewright.schedule import Kind, Program, build, subdivided
from stagewright.schedule.saving import insert_recomputation

_PERIODIC = frozenset({"1f1b", "pipedream"})
"""Families in which, once every rank alternates between F and B, each microbatch repeats the state of the one before."""

Pass = Callable[[Program], Program]


@lru_cache(maxsize=64)
def built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Program:
    """The computations of every rank, in order; kept, because all partitions of a search have the same."""
    return build(name, num_ranks, num_microbatches, num_chunks)


@lru_cache(maxsize=32)
def shortened(program: Program) -> Program:
    """The 1F1B program, with or without steps in between and sharding units, of as many microbatches as show every state of
    its memory; other programs as they are."""
    enough = program.num_ranks + 4
    if program.name not in _PERIODIC or program.num_microbatches <= enough:
        return program
    units = Counter(program.placement.rank_of_stage)
    numbers = [units[rank] for rank in range(program.num_ranks)]
    whole, short = (
        subdivided(built(program.name, program.num_ranks, count), numbers)
        for count in (program.num_microbatches, enough)
    )
    for passes in _orders_of_passes(program):
        if _after(passes, whole) == program:
            return _after(passes, short)
    return program


def _orders_of_passes(program: Program) -> list[tuple[Pass, ...]]:
    """Ways in which recomputation and sharding may have been put into `program`."""
    kinds = {action.kind for action in program}
    saving: tuple[Pass, ...] = (partial(_saving_like, program),) if Kind.R in kinds else ()
    if not kinds & SHARDING_KINDS:
        return [saving]
    shardings: list[Pass] = [partial(sharded_like, program, buffers) for buffers in (NUM_BUFFERS, None)]
    found = [order for sharding in shardings for order in ((sharding, *saving), (*saving, sharding))]
    return found if saving else found[::2]


def _after(passes: Iterable[Pass], program: Program) -> Program:
    return reduce(lambda made, one: one(made), passes, program)


def _saving_like(program: Program, other: Program) -> Program:
    """`other` with R for the same stages as `program`."""
    return insert_recomputation(other, {action.stage for action in program if action.kind is Kind.R})
