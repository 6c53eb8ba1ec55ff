"""Replay of a program without time, which finds actions that cannot run and what blocks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagewright.schedule.action import Action
from stagewright.schedule.encoded import Effects, EncodedRules
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Token, TokenRules


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot continue: its next action and the tokens that it waits for."""

    rank: int
    action: Action
    missing: tuple[Token, ...]

    def __str__(self) -> str:
        missing = ", ".join(map(str, self.missing))
        return f"rank {self.rank} is blocked at {self.action}, which waits for {missing}"


@dataclass
class Replay:
    """The state of a replay: the first `next_index[r]` actions of `ranks[r]` are done, and the tokens numbered in `held`
    hold.

    Later actions in `ranks` may be changed between runs.
    """

    program: Program
    rules: TokenRules
    ranks: list[list[Action]] = field(init=False)
    next_index: list[int] = field(init=False)
    codes: EncodedRules = field(init=False)
    held: set[int] = field(init=False, default_factory=set)
    waiting: dict[int, set[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = [list(actions) for actions in self.program.ranks]
        self.next_index = [0] * self.program.num_ranks
        self.codes = EncodedRules(self.rules, self.program.num_microbatches)

    def run(self) -> list[Blocked]:
        """Perform all actions that can run; return the ranks that are then blocked, none if all are done."""
        ranks = range(self.program.num_ranks)
        self.go_on(ranks)
        return [blocked for rank in ranks if (blocked := self.blocked(rank))]

    def go_on(self, ranks: Iterable[int]) -> None:
        """Perform all actions that can run after the next actions of `ranks` have changed."""
        ready = list(ranks)
        while ready:
            ready += self._advance(ready.pop())

    def next_action(self, rank: int) -> Action | None:
        """Return the next action of `rank`; None when it is done."""
        index, actions = self.next_index[rank], self.ranks[rank]
        return actions[index] if index < len(actions) else None

    def blocked(self, rank: int) -> Blocked | None:
        """Return what `rank` waits for, or None if it is done or can continue."""
        index, actions = self.next_index[rank], self.ranks[rank]
        if index == len(actions):
            return None
        missing = tuple(
            self.codes.token(code)
            for code in self.codes.effects(actions[index]).needs
            if code not in self.held
        )
        return Blocked(rank, actions[index], missing) if missing else None

    def perform(self, action: Action) -> list[int]:
        """Perform `action`, whether or not the program has it; return the ranks that waited for its results."""
        return self._make(self.codes.effects(action))

    def _make(self, effects: Effects) -> list[int]:
        self.held.update(effects.makes)
        if effects.drops:
            self.held.difference_update(effects.drops)
        waiting = self.waiting
        return [rank for code in effects.makes if code in waiting for rank in waiting.pop(code)]

    def _advance(self, rank: int) -> list[int]:
        """Run `rank` until it is blocked; return the ranks that waited for its results."""
        actions, index, held = self.ranks[rank], self.next_index[rank], self.held
        woken: list[int] = []
        while index < len(actions):
            effects = self.codes.effects(actions[index])
            if not held.issuperset(effects.needs):
                missing = next(code for code in effects.needs if code not in held)
                self.waiting.setdefault(missing, set()).add(rank)
                break
            woken += self._make(effects)
            index += 1
        self.next_index[rank] = index
        return woken
