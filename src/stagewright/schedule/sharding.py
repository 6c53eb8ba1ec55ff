"""Lowering of sharded data parallelism: gathers and releases of weights, and reductions of gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.program import Program

NUM_BUFFERS = 2
"""Stages of which a rank holds gathered parameters or whole gradients at once: one in use, one in transfer."""

_USES_WEIGHTS = frozenset({Kind.F, Kind.I, Kind.B, Kind.R})
_ADDS_GRADIENTS = frozenset({Kind.W, Kind.B})
Run = tuple[int, int, int]
"""A stage, and the indices of the first and the last action of a run that uses only this stage."""


def insert_gathers(
    program: Program,
    num_buffers: int = NUM_BUFFERS,
    stages: Collection[int] | None = None,
    weight_grads: Collection[int] = (),
) -> Program:
    """Insert gathers of the weights of `stages` (default: all) before use, and releases after.

    The weight gradients of the stages in `weight_grads` use weights too (for example, of normalisations).

    A rank has buffers for the whole weights of `num_buffers` stages. It always holds those that it will use next, so a
    gather starts as soon as a buffer is free and overlaps with the computations of the stage before: in breadth-first order
    every stage is gathered once per forward and backward, in depth-first order once per round of microbatches. Source:
    Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4 (arXiv 2211.05953).

    >>> from stagewright.schedule.builders import build
    >>> print("\\n".join(insert_gathers(build("breadth-first", 1, 1, 3)).lines()))
    0GATHER 1GATHER 0F0 0RELEASE 2GATHER 1F0 2F0 2B0 2RELEASE 0GATHER 1B0 1RELEASE 0B0 0RELEASE
    """
    if num_buffers < 1:
        raise ScheduleError(
            f"num_buffers={num_buffers}: a rank needs buffers for the weights of at least one stage"
        )
    chosen = set(range(program.num_stages) if stages is None else stages)
    reading = set(weight_grads)
    return program.with_ranks(
        _with_gathers(actions, num_buffers, chosen, reading) for actions in program.ranks
    )


def insert_microbatch_gathers(
    program: Program, stages: Collection[int], *, reduces_once: bool = False
) -> Program:
    """Insert, in a program of one rank, gathers of `stages` before a microbatch's first forward, and releases and reductions
    after its last backward: a sharding unit that stays gathered in between. With `reduces_once` gradients are reduced only
    after the last microbatch.

    >>> from stagewright.schedule.builders import build
    >>> print("\\n".join(insert_microbatch_gathers(build("breadth-first", 1, 1, 3), [0, 2]).lines()))
    0GATHER 2GATHER 0F0 1F0 2F0 2B0 1B0 0B0 0RELEASE 2RELEASE 0REDUCE 2REDUCE
    """
    held = sorted(set(stages))
    return program.with_ranks(_with_held(actions, held, reduces_once) for actions in program.ranks)


def _with_held(actions: Sequence[Action], held: Sequence[int], reduces_once: bool) -> Iterator[Action]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.microbatch is not None:
            first.setdefault(action.microbatch, index)
            last[action.microbatch] = index
    begins, ends, num_open = set(first.values()), set(last.values()), 0
    end = max(ends, default=0)
    for index, action in enumerate(actions):
        if index in begins:
            if not num_open:
                yield from (Action(Kind.GATHER, stage) for stage in held)
            num_open += 1
        yield action
        if index in ends:
            num_open -= 1
            if not num_open:
                reducing = (Kind.REDUCE,) if index == end or not reduces_once else ()
                yield from (Action(kind, stage) for kind in (Kind.RELEASE, *reducing) for stage in held)


def insert_reductions(
    program: Program, num_buffers: int | None = None, stages: Collection[int] | None = None
) -> Program:
    """Insert reductions of the gradients of `stages` (default: all) where a rank has no buffer to keep accumulating them.

    A rank has buffers for the gradients of `num_buffers` stages; None: of all, so that each stage is reduced once, right
    after its last backward, overlapped with the backwards of the stages before it.

    >>> from stagewright.schedule.builders import build
    >>> print("\\n".join(insert_reductions(build("breadth-first", 1, 2, 2)).lines()))
    0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE 0B0 0B1 0REDUCE
    """
    chosen = set(range(program.num_stages) if stages is None else stages)
    return program.with_ranks(
        _with_reductions(actions, num_buffers or program.num_stages, chosen) for actions in program.ranks
    )


def _with_gathers(
    actions: Sequence[Action], num_buffers: int, stages: set[int], weight_grads: set[int]
) -> Iterator[Action]:
    runs = _runs(actions, _USES_WEIGHTS, stages, weight_grads)
    after = {last: index for index, (_, _, last) in enumerate(runs)}
    held: list[int] = []
    if runs:
        yield from _swap(held, _next_stages(runs, num_buffers))
    for index, action in enumerate(actions):
        yield action
        if index in after:
            yield from _swap(held, _next_stages(runs[after[index] + 1 :], num_buffers))


def _swap(held: list[int], wanted: list[int]) -> Iterator[Action]:
    """Release stages that are no longer wanted, and gather those that are missing."""
    yield from (Action(Kind.RELEASE, stage) for stage in held if stage not in wanted)
    yield from (Action(Kind.GATHER, stage) for stage in wanted if stage not in held)
    held[:] = wanted


def _with_reductions(actions: Sequence[Action], num_buffers: int, stages: set[int]) -> Iterator[Action]:
    runs = _runs(actions, _ADDS_GRADIENTS, stages)
    after = {last: index for index, (_, _, last) in enumerate(runs)}
    for index, action in enumerate(actions):
        yield action
        if index in after:
            stage, following = runs[after[index]][0], runs[after[index] + 1 :]
            if stage not in _next_stages(following, num_buffers):
                yield Action(Kind.REDUCE, stage)


def _runs(
    actions: Sequence[Action], kinds: frozenset[Kind], stages: set[int], weight_grads: Collection[int] = ()
) -> list[Run]:
    """Return runs of actions of `kinds` (and of W for the stages of `weight_grads`) on one of `stages`, ignoring other
    actions in between."""
    uses = [
        (part.stage, index)
        for index, action in enumerate(actions)
        for part in action.parts
        if part.stage in stages
        if part.kind in kinds or (part.kind is Kind.W and part.stage in weight_grads)
    ]
    grouped = (
        (stage, [index for _, index in group]) for stage, group in groupby(uses, key=lambda entry: entry[0])
    )
    return [(stage, indices[0], indices[-1]) for stage, indices in grouped]


def _next_stages(runs: Sequence[Run], count: int) -> list[int]:
    """Return the first `count` different stages of `runs`."""
    stages: list[int] = []
    for stage, _, _ in runs:
        if len(stages) == count:
            break
        if stage not in stages:
            stages.append(stage)
    return stages
