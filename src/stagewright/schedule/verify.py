"""Verification of programs: a valid program runs to its end and does all work exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stagewright.errors import ScheduleError
from stagewright.schedule.action import COMPUTE, TRANSFERS, Action, Kind
from stagewright.schedule.encoded import EncodedRules
from stagewright.schedule.lanes import check_lanes
from stagewright.schedule.program import Program
from stagewright.schedule.replay import Replay
from stagewright.schedule.tokens import Edge, TokenRules


def verify(program: Program, edges: Iterable[Edge] | None = None) -> Program:
    """Return `program` if it is placed, complete, matched, ordered and free of deadlock.

    A lowered program must not hang on lanes that run transfers in issue order. It must also satisfy a stricter rule than any
    transport needs: it must run even if every send waits until its receive is posted.

    Raises:
        ScheduleError: names the rule, the action and, for a deadlock, what every rank is blocked at.
    """
    edges = None if edges is None else tuple(edges)
    check_placed(program)
    check_complete(program)
    check_ordered(program, edges)
    check_reduced(program)
    if program.is_lowered:
        check_transfers_matched(program, edges)
        check_lanes(program, edges)
    check_free_of_deadlock(program, edges)
    return program


def check_placed(program: Program) -> None:
    """Check that every action is on the rank of its stage, and that its stage and microbatch exist."""
    for rank, actions in enumerate(program.ranks):
        for part in (part for action in actions for part in action.parts):
            _check_part_placed(program, rank, part)


def _check_part_placed(program: Program, rank: int, action: Action) -> None:
    for stage in (action.stage, action.peer):
        if stage is not None and not 0 <= stage < program.num_stages:
            raise ScheduleError(f"rank {rank}: {action} names stage {stage} of {program.num_stages}")
    if action.microbatch is not None and not 0 <= action.microbatch < program.num_microbatches:
        raise ScheduleError(
            f"rank {rank}: {action} names a microbatch outside 0 to {program.num_microbatches - 1}"
        )
    holder = program.placement.rank_of_stage[action.stage]
    if holder != rank:
        raise ScheduleError(
            f"rank {rank} runs {action}, but stage {action.stage} is placed on rank {holder}; "
            "move the action or change the placement"
        )


def check_complete(program: Program) -> None:
    """Check that every stage and microbatch has one forward, and one full backward or both halves of one."""
    computations = (part for action in program for part in action.parts if part.kind in COMPUTE)
    counts = Counter((part.kind, part.stage, part.microbatch) for part in computations)
    for stage in range(program.num_stages):
        for microbatch in range(program.num_microbatches):
            f, b, i, w, r = (
                counts[kind, stage, microbatch] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
            )
            if f != 1:
                raise ScheduleError(
                    f"{Action(Kind.F, stage, microbatch)} occurs {f} times; it must occur once"
                )
            if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"the backward of stage {stage}, microbatch {microbatch} has {b} B, {i} I and {w} W; "
                    "it must be one B, or one I and one W"
                )
            if r > 1:
                raise ScheduleError(f"{Action(Kind.R, stage, microbatch)} occurs {r} times; once is enough")


def check_ordered(program: Program, edges: Iterable[Edge] | None = None) -> None:
    """Check that every action comes after the actions of its rank that make its tokens, and before those that drop them."""
    codes = EncodedRules(TokenRules.of(program, edges), program.num_microbatches)
    for rank, actions in enumerate(program.ranks):
        effects = [codes.effects(action) for action in actions]
        made_here = {code for effect in effects for code in effect.makes}
        held: set[int] = set()
        for action, (needs, makes, drops) in zip(actions, effects, strict=True):
            for code in needs:
                if code not in held and code in made_here:
                    raise ScheduleError(
                        f"rank {rank}: {action} needs the {codes.token(code)}, which does not hold there; "
                        "it is made later on this rank or was dropped before"
                    )
            held.update(makes)
            held.difference_update(drops)


def check_reduced(program: Program) -> None:
    """Check that no gradient is added to a stage after its last reduction."""
    unreduced: dict[int, Action] = {}
    reduced: set[int] = set()
    for action in program:
        if action.kind is Kind.REDUCE:
            unreduced.pop(action.stage, None)
            reduced.add(action.stage)
        for part in action.parts:
            if part.kind in (Kind.B, Kind.W):
                unreduced[part.stage] = part
    for stage in sorted(unreduced.keys() & reduced):
        raise ScheduleError(
            f"{unreduced[stage]} adds to the gradients of stage {stage} after their last reduction; "
            f"move {stage}REDUCE after it"
        )


def check_transfers_matched(program: Program, edges: Iterable[Edge] | None = None) -> None:
    """Check that every value and gradient that crosses ranks is sent and received once, and nothing else is."""
    rules = TokenRules.of(program, edges)
    expected = Counter(
        transfer
        for a, c in rules.edges
        if rules.crosses(a, c)
        for microbatch in range(program.num_microbatches)
        for transfer in (
            Action(Kind.SEND_F, a, microbatch, c),
            Action(Kind.RECV_F, c, microbatch, a),
            Action(Kind.SEND_B, c, microbatch, a),
            Action(Kind.RECV_B, a, microbatch, c),
        )
    )
    transfers = Counter(action for action in program if action.kind in TRANSFERS)
    if transfers == expected:
        return
    for action, count in (expected - transfers).items():
        raise ScheduleError(
            f"{action} is missing {count} time(s): add it, or lower the compute-only program again"
        )
    for action, count in (transfers - expected).items():
        raise ScheduleError(
            f"{action} occurs {count} time(s) too often: it matches no edge between stages of two ranks"
        )


def check_free_of_deadlock(
    program: Program, edges: Iterable[Edge] | None = None, *, sends_block: bool = True
) -> None:
    """Check that the program runs to its end; with `sends_block` even if every send waits until its receive is posted."""
    rules = TokenRules.of(program, edges, sends_block=sends_block and program.is_lowered)
    if blocked := Replay(program, rules).run():
        raise ScheduleError(f"{program.name} deadlocks:\n" + "\n".join(f"  {rank}" for rank in blocked))
