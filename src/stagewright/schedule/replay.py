"""Replay of a program without time: whether its actions can run, and what blocks them if not."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagewright.schedule.action import Action
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Rules, Token


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: its next action and the tokens nobody has made."""

    rank: int
    index: int
    action: Action
    missing: tuple[Token, ...]

    def __str__(self) -> str:
        missing = ", ".join(map(str, self.missing))
        return f"rank {self.rank} is blocked at {self.action}, which waits for {missing}"


@dataclass
class Replay:
    """The state of a replay: `next_index[r]` actions of rank `r` are done and the tokens in `held` hold."""

    program: Program
    rules: Rules
    next_index: list[int] = field(init=False)
    held: set[Token] = field(init=False, default_factory=set)
    order: list[tuple[int, Action]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.next_index = [0] * self.program.num_ranks

    def run(self) -> list[Blocked]:
        """Perform all that can be; return the ranks that are then blocked, none when all is done."""
        ranks, moved = range(self.program.num_ranks), True
        while moved:
            moved = sum(self._advance(rank) for rank in ranks) > 0
        return [blocked for rank in ranks if (blocked := self.blocked(rank))]

    def blocked(self, rank: int) -> Blocked | None:
        """What rank `rank` waits for, or ``None`` when it is done or can go on."""
        index, actions = self.next_index[rank], self.program.ranks[rank]
        if index == len(actions):
            return None
        missing = tuple(token for token in self.rules.needs(actions[index]) if token not in self.held)
        return Blocked(rank, index, actions[index], missing) if missing else None

    def perform(self, rank: int, action: Action) -> None:
        """Let `action` happen on `rank`, whether or not the program has it there."""
        self.held.update(self.rules.makes(action))
        self.held.difference_update(self.rules.drops(action))
        self.order.append((rank, action))

    def _advance(self, rank: int) -> bool:
        """Run `rank` as far as it goes; say whether it moved."""
        actions, start = self.program.ranks[rank], self.next_index[rank]
        index, held, needs = start, self.held, self.rules.needs
        while index < len(actions) and all(token in held for token in needs(actions[index])):
            self.perform(rank, actions[index])
            index += 1
        self.next_index[rank] = index
        return index > start
