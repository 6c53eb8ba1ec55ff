"""Programs of many microbatches, shortened to as few as reach every state of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce
from itertools import groupby

from stagewright.planning.prediction.sharding import SHARDING_KINDS, sharded_like
from stagewright.schedule import Kind, Program, build, subdivided
from stagewright.schedule.lower import insert_recomputation
from stagewright.schedule.sharding import NUM_BUFFERS

_PERIODIC = frozenset({"1f1b", "pipedream", "interleaved-1f1b"})
"""Schedules in which each microbatch repeats the memory state of the one before, once every rank alternates between F and B;
with several stages per rank, that of the microbatch as many before as there are ranks."""

Pass = Callable[[Program], Program]


@lru_cache(maxsize=64)
def built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Program:
    """Return the computations of every rank, in order; cached, because all partitions of a search share them."""
    return build(name, num_ranks, num_microbatches, num_chunks)


@lru_cache(maxsize=32)
def shortened(program: Program) -> Program:
    """Return a 1F1B program with just enough microbatches to reach every state of its memory, other programs unchanged.

    The program may be interleaved, and have STEP actions and sharding units.
    """
    num_ranks = program.num_ranks
    numbers = [len(list(units)) for _, units in groupby(program.placement.rank_of_stage)]
    chunks = len(numbers) // num_ranks if program.name == "interleaved-1f1b" else None
    enough = num_ranks + 4 if chunks is None else 4 * num_ranks
    if program.name not in _PERIODIC or program.num_microbatches <= enough or chunks == 0:
        return program
    whole, short = (
        subdivided(built(program.name, num_ranks, count, chunks), numbers)
        for count in (program.num_microbatches, enough)
    )
    for passes in _orders_of_passes(program):
        if _after(passes, whole) == program:
            return _after(passes, short)
    return program


def _orders_of_passes(program: Program) -> list[tuple[Pass, ...]]:
    """Return the orders in which recomputation and sharding may have been inserted into `program`."""
    kinds = {action.kind for action in program}
    recomputation: tuple[Pass, ...] = (partial(_recomputed_like, program),) if Kind.R in kinds else ()
    if not kinds & SHARDING_KINDS:
        return [recomputation]
    shardings: list[Pass] = [partial(sharded_like, program, buffers) for buffers in (NUM_BUFFERS, None)]
    orders = [
        order for sharding in shardings for order in ((sharding, *recomputation), (*recomputation, sharding))
    ]
    return orders if recomputation else orders[::2]


def _after(passes: Iterable[Pass], program: Program) -> Program:
    return reduce(lambda inserted, insert: insert(inserted), passes, program)


def _recomputed_like(program: Program, other: Program) -> Program:
    """Return `other` with R for the same stages as `program`."""
    return insert_recomputation(other, {action.stage for action in program if action.kind is Kind.R})
