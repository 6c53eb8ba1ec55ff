"""The greedy list scheduler: every rank always takes the most urgent work that is ready."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stagewright.errors import ScheduleError
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.placement import Placement, loop
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Edge, Rules, Token, What

_AFTER_INPUT_GRAD = (Kind.F, Kind.I, Kind.W)
_OTHERWISE = (Kind.I, Kind.F, Kind.W)


@dataclass(frozen=True)
class PassSeconds:
    """Seconds per stage of the three passes, and of one transfer between ranks."""

    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    transfer_s: float = 0.0

    def of(self, action: Action) -> float:
        columns = {Kind.F: self.forward_s, Kind.I: self.input_grad_s, Kind.W: self.weight_grad_s}
        return columns[action.kind][action.stage]


def greedy(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    placement: Placement | None = None,
    seconds: PassSeconds | None = None,
    edges: Iterable[Edge] | None = None,
    delays_unhidden: bool = True,
    max_in_flight: int | None = None,
) -> Program:
    """Split backwards scheduled greedily for given pass times on any placement (default: looped, equal
    passes).

    Ready work is taken in the order input gradient, forward, weight gradient, after an input gradient with
    the forward first; input gradients of the deepest stage first, the others by microbatch. With
    `delays_unhidden`, once backwards have begun, work whose input has just come from the rank that started
    last waits behind other ready work, because its transfer could not hide behind a computation.
    `max_in_flight` bounds the microbatches between their first forward and their last input gradient.

    Source: the list scheduler of AdaPtis (Guo et al. 2025, arXiv 2509.23722) as in
    github.com/guojihu-hana/SimPipe.
    Ignores: memory, beyond `max_in_flight`.

    >>> print("\\n".join(greedy(2, 3).lines()))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    placement = placement or loop(num_ranks, num_chunks)
    if placement.num_ranks != num_ranks:
        raise ScheduleError(f"greedy: a placement on {placement.num_ranks} ranks for {num_ranks} ranks")
    ones = [1.0] * placement.num_stages
    times = seconds or PassSeconds(ones, ones, ones)
    empty = Program("greedy", placement, num_microbatches, ((),) * num_ranks)
    return _ListScheduler(empty, Rules.of(empty, edges), times, delays_unhidden, max_in_flight).run()


@dataclass
class _Rank:
    """What a rank has done and what it could do."""

    ready: dict[Kind, list[tuple[tuple[int, ...], Action]]] = field(default_factory=lambda: defaultdict(list))
    done: list[Action] = field(default_factory=list)
    running: bool = False
    last_start: float = -1.0
    last_end: float = -1.0


class _ListScheduler:
    """Event loop: at each time all completions first, then every free rank takes its best ready work."""

    def __init__(
        self,
        empty: Program,
        rules: Rules,
        seconds: PassSeconds,
        delays_unhidden: bool,
        max_in_flight: int | None,
    ) -> None:
        self.program, self.rules, self.seconds = empty, rules, seconds
        self.delays_unhidden = delays_unhidden
        self.max_in_flight = max_in_flight or empty.num_microbatches
        self.rank_of = empty.placement.rank_of_stage
        self.ranks = [_Rank() for _ in range(empty.num_ranks)]
        self.end_of: dict[Action, float] = {}
        self.events: list[tuple[float, int, str, Action]] = []
        self.num_events = 0
        self.backwards_begun = False
        self.missing: dict[Action, int] = {}
        self.users: dict[Token, list[Action]] = defaultdict(list)

    def run(self) -> Program:
        self._register_all()
        self._dispatch(0.0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, what, action = heapq.heappop(self.events)
                if what == "end":
                    self._complete(action, now)
                else:
                    self._make_ready(action)
            self._dispatch(now)
        return self.program.with_ranks(rank.done for rank in self.ranks)

    def _register_all(self) -> None:
        for m in range(self.program.num_microbatches):
            for stage in range(self.program.num_stages):
                for kind in (Kind.F, Kind.W, Kind.I):
                    action = Action(kind, stage, m)
                    needs = (*self.rules.needs(action), *self._admission(action))
                    self.missing[action] = len(needs)
                    for token in needs:
                        self.users[token].append(action)
                    if not needs:
                        self._make_ready(action)

    def _admission(self, action: Action) -> tuple[Token, ...]:
        """What a forward of stage 0 needs besides its input: that an earlier microbatch is through."""
        assert action.microbatch is not None
        before = action.microbatch - self.max_in_flight
        enters = action.kind is Kind.F and action.stage == 0 and before >= 0
        return (Token(What.HELD, 0, before),) if enters else ()

    def _complete(self, action: Action, now: float) -> None:
        """Hand on what `action` made: at once on its rank, after a transfer elsewhere."""
        rank = self.rank_of[action.stage]
        self.ranks[rank].running = False
        self.end_of[action] = now
        users = [user for token in self.rules.makes(action) for user in self.users[token]]
        for user in sorted(users, key=lambda user: user.kind is not Kind.W):
            self.missing[user] -= 1
            if self.missing[user] == 0:
                wait = 0.0 if self.rank_of[user.stage] == rank else self.seconds.transfer_s
                if wait:
                    self._push(now + wait, "ready", user)
                else:
                    self._make_ready(user)

    def _make_ready(self, action: Action) -> None:
        assert action.microbatch is not None
        self.num_events += 1
        order = (
            (-action.stage, action.microbatch) if action.kind is Kind.I else (action.microbatch, action.stage)
        )
        heapq.heappush(
            self.ranks[self.rank_of[action.stage]].ready[action.kind], ((*order, self.num_events), action)
        )

    def _push(self, time: float, what: str, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, what, action))

    def _dispatch(self, now: float) -> None:
        for index, rank in enumerate(self.ranks):
            if rank.running:
                continue
            action = self._best(index, now)
            if action is None:
                continue
            self.backwards_begun |= action.kind is Kind.I
            rank.done.append(action)
            rank.running, rank.last_start, rank.last_end = True, now, now + self.seconds.of(action)
            self._push(rank.last_end, "end", action)

    def _best(self, index: int, now: float) -> Action | None:
        """Take the first ready work that is not delayed, else the first; ``None`` when nothing is ready."""
        rank = self.ranks[index]
        last_kind = rank.done[-1].kind if rank.done else None
        first: tuple[Kind, tuple[tuple[int, ...], Action]] | None = None
        for kind in _AFTER_INPUT_GRAD if last_kind is Kind.I else _OTHERWISE:
            for entry in sorted(rank.ready[kind]):
                first = first or (kind, entry)
                if not self._is_delayed(entry[1], index, now):
                    return self._take(rank, kind, entry)
        return self._take(rank, *first) if first else None

    @staticmethod
    def _take(rank: _Rank, kind: Kind, entry: tuple[tuple[int, ...], Action]) -> Action:
        rank.ready[kind].remove(entry)
        heapq.heapify(rank.ready[kind])
        return entry[1]

    def _is_delayed(self, action: Action, index: int, now: float) -> bool:
        """Whether the input of `action` came too late to travel behind the rank's last computation."""
        rank = self.ranks[index]
        if not self.delays_unhidden or not self.backwards_begun or rank.last_end != now:
            return False
        if action.kind is Kind.W:
            return False
        before = -1 if action.kind is Kind.F else 1
        producer = Action(action.kind, action.stage + before, action.microbatch)
        others = (other for place, other in enumerate(self.ranks) if place != index and other.done)
        return any(other.done[-1] == producer for other in others) and self.end_of[producer] > rank.last_start
