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
    """The state of a replay: the first `next_index[r]` of `ranks[r]` are done and the tokens in `held` hold.

    What is still to come in `ranks` may be changed between runs.
    """

    program: Program
    rules: Rules
    ranks: list[list[Action]] = field(init=False)
    next_index: list[int] = field(init=False)
    held: set[Token] = field(init=False, default_factory=set)
    waiting: dict[Token, set[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = [list(actions) for actions in self.program.ranks]
        self.next_index = [0] * self.program.num_ranks

    def run(self) -> list[Blocked]:
        """Perform all that can be; return the ranks that are then blocked, none when all is done."""
        ranks = range(self.program.num_ranks)
        ready = list(ranks)
        while ready:
            ready += self._advance(ready.pop())
        return [blocked for rank in ranks if (blocked := self.blocked(rank))]

    def blocked(self, rank: int) -> Blocked | None:
        """What rank `rank` waits for, or ``None`` when it is done or can go on."""
        index, actions = self.next_index[rank], self.ranks[rank]
        if index == len(actions):
            return None
        missing = tuple(token for token in self.rules.needs(actions[index]) if token not in self.held)
        return Blocked(rank, index, actions[index], missing) if missing else None

    def perform(self, action: Action) -> list[int]:
        """Let `action` happen, whether or not the program has it; return the ranks that waited for what it makes."""
        made = self.rules.makes(action)
        self.held.update(made)
        self.held.difference_update(self.rules.drops(action))
        return [rank for token in made for rank in self.waiting.pop(token, ())]

    def _advance(self, rank: int) -> list[int]:
        """Run `rank` as far as it goes; return the ranks that waited for something it made."""
        actions, index, needs = self.ranks[rank], self.next_index[rank], self.rules.needs
        woken: list[int] = []
        while index < len(actions):
            missing = next((token for token in needs(actions[index]) if token not in self.held), None)
            if missing is not None:
                self.waiting.setdefault(missing, set()).add(rank)
                break
            woken += self.perform(actions[index])
            index += 1
        self.next_index[rank] = index
        return woken
