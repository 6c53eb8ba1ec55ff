"""Lowering of programs: sends and receives, and recomputation before backwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache

from stagewright.errors import ScheduleError
from stagewright.schedule.action import BACKWARDS, COMPUTE, RECEIVE_OF, SENDS, Action, Kind
from stagewright.schedule.program import Program
from stagewright.schedule.replay import Replay
from stagewright.schedule.tokens import Edge, TokenRules, What

_SEND_OF = {What.VALUE_OUT: Kind.SEND_F, What.GRADIENT_OUT: Kind.SEND_B}
_RECEIVE_THAT_POSTS = {What.VALUE_POSTED: Kind.RECV_F, What.GRADIENT_POSTED: Kind.RECV_B}


def receives_ahead(on_gpus: bool) -> int:
    """Return how many compute actions before its use a receive is posted.

    On a GPU a posted receive is a kernel that spins until its message arrives, on multiprocessors that computations could
    use, and anything that waits for the whole device waits for it too. So there receives are posted right before their use.
    """
    return 0 if on_gpus else 1


def insert_communication(program: Program, edges: Iterable[Edge] | None = None, *, ahead: int = 1) -> Program:
    """Insert the sends and receives of every value and gradient that crosses ranks.

    A send follows the action that computes its value. A receive is posted `ahead` compute actions before the one that uses
    it, so that they hide the transfer, or earlier if a transfer that is needed later was sent first: each pair of ranks
    sends and receives in the same order per direction. At one boundary receives come before sends.

    The result runs even if every send waits until its receive is posted: the program is replayed under that rule, and a
    receive that would block a send is moved up to the current action of its rank. Moving a receive up never blocks anything,
    and a rank that is stuck without a blocked send would be stuck with unlimited buffers too, so every program whose
    computations can run becomes free of deadlock.

    >>> from stagewright.schedule.builders import build
    >>> print(insert_communication(build("1f1b", 2, 2)).to_text())
    program 1f1b
    microbatches 2
    placement 0 1
    0: 0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1
    1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    <BLANKLINE>

    Raises:
        ScheduleError: the program already has transfers, or its computations wait for each other in a circle.
    """
    if program.is_lowered:
        raise ScheduleError(
            f"{program.name} already has sends and receives; lower its compute_only() program instead"
        )
    if ahead < 0:
        raise ScheduleError(
            f"ahead={ahead}: receives can be posted 0 or more compute actions ahead of their use"
        )
    if program.num_ranks == 1:
        return program
    rules = TokenRules.of(program, edges).lowered()
    sends = _sends_after(program, rules)
    receives = _receives_before(program, sends, rules, ahead)
    lowered = program.with_ranks(map(_merged, program.ranks, receives, sends))
    return _unblock_sends(lowered, rules.edges)


def _sends_after(program: Program, rules: TokenRules) -> list[list[list[Action]]]:
    """Return, per rank and action, the sends of its results to other ranks."""

    @cache
    def sent(kind: Kind, stage: int) -> list[tuple[Kind, int | None]]:
        tokens = rules.makes(Action(kind, stage))
        return [(_SEND_OF[token.what], token.peer) for token in tokens if token.what in _SEND_OF]

    def sends(action: Action) -> list[Action]:
        return [
            Action(kind, part.stage, part.microbatch, peer)
            for part in action.parts
            for kind, peer in sent(part.kind, part.stage)
        ]

    return [list(map(sends, actions)) for actions in program.ranks]


def _receives_before(
    program: Program, sends: Sequence[Sequence[list[Action]]], rules: TokenRules, ahead: int
) -> list[dict[int, list[Action]]]:
    """Return, per rank, the receives posted right before an action, by its index."""
    user_index = _index_of_users(program, rules)
    before: list[dict[int, list[Action]]] = [defaultdict(list) for _ in program.ranks]
    for rank in range(program.num_ranks):
        limits: dict[tuple[int, Kind], int] = {}
        for send in reversed([send for group in sends[rank] for send in group]):
            receive = _receive_of(send)
            target = program.placement.rank_of_stage[receive.stage]
            wanted = _step_back(program.ranks[target], user_index[receive], ahead)
            index = min(wanted, limits.get((target, send.kind), wanted))
            limits[target, send.kind] = index
            before[target][index].append(receive)
    return [{index: group[::-1] for index, group in groups.items()} for groups in before]


def _index_of_users(program: Program, rules: TokenRules) -> dict[Action, int]:
    """Return, for each receive, the index on its rank of the action that uses the received value."""

    @cache
    def received(kind: Kind, stage: int) -> list[tuple[Kind, int]]:
        tokens = rules.needs(Action(kind, stage))
        return [(_RECEIVE_THAT_POSTS[t.what], t.stage) for t in tokens if t.what in _RECEIVE_THAT_POSTS]

    return {
        Action(kind, part.stage, part.microbatch, sender): index
        for actions in program.ranks
        for index, action in enumerate(actions)
        for part in action.parts
        for kind, sender in received(part.kind, part.stage)
    }


def _step_back(actions: Sequence[Action], index: int, ahead: int) -> int:
    """Return the index of the compute action `ahead` compute actions before `index`, or of the first."""
    while ahead and index:
        index -= 1
        ahead -= actions[index].kind in COMPUTE
    return index


def _merged(
    actions: Sequence[Action], receives: dict[int, list[Action]], sends: Sequence[list[Action]]
) -> list[Action]:
    merged: list[Action] = []
    for index, action in enumerate(actions):
        merged += [*receives.get(index, ()), *(sends[index - 1] if index else ()), action]
    return merged + (sends[-1] if sends else [])


def _unblock_sends(program: Program, edges: tuple[Edge, ...]) -> Program:
    """Move receives up until no send waits for a receive that its rank has not reached."""
    replay = Replay(program, TokenRules.of(program, edges, sends_block=True))
    ranks = range(program.num_ranks)
    replay.go_on(ranks)
    while waiting := [action for rank in ranks if (action := replay.next_action(rank))]:
        sends = [action for action in waiting if action.kind in SENDS]
        if not sends:
            blocked = "\n".join(f"  {rank}" for rank in replay.run())
            raise ScheduleError(f"{program.name} deadlocks:\n{blocked}")
        replay.go_on([_move_up(_receive_of(send), replay) for send in sends])
    return program.with_ranks(replay.ranks)


def _receive_of(send: Action) -> Action:
    """Return the other end of a send."""
    assert send.peer is not None
    return Action(RECEIVE_OF[send.kind], send.peer, send.microbatch, send.stage)


def _move_up(receive: Action, replay: Replay) -> int:
    """Move `receive` up to be the next action of its rank; return the rank."""
    target = replay.program.placement.rank_of_stage[receive.stage]
    actions, reached = replay.ranks[target], replay.next_index[target]
    del actions[actions.index(receive, reached)]
    actions.insert(reached, receive)
    return target


def insert_recomputation(program: Program, stages: Collection[int]) -> Program:
    """Insert R before every backward of `stages`: recomputation, or fetches from the host, of what that needs first.

    >>> from stagewright.schedule.builders import build
    >>> print("\\n".join(insert_recomputation(build("1f1b", 2, 1), [0]).lines()))
    0F0 0R0 0B0
    1F0 1B0
    """

    def with_recomputation(actions: Sequence[Action]) -> Iterator[Action]:
        for action in actions:
            for part in action.parts:
                if part.kind in BACKWARDS and part.stage in stages:
                    yield Action(Kind.R, part.stage, part.microbatch)
            yield action

    return program.with_ranks(map(with_recomputation, program.ranks))
