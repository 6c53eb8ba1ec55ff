"""Tokens and rules of schedules: what an action needs, makes and drops.

Verification, lowering, simulation and execution all derive from `TokenRules`. A token is a fact that holds from the moment
an action makes it: "the value of stage 1 for stage 2 of microbatch 0 is available". Tokens without a microbatch are a
stage's state (its gathered weights, its accumulated gradients); the latest action that makes one counts.

Stages depend on each other through *edges* (producer stage, consumer stage). The chain ``s -> s + 1`` is
the default; further edges are skip connections. A forward needs the values of all edges that end in its
stage, an input gradient needs the gradients of all edges that begin there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.schedule.action import TRANSFERS, Action, Kind
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program

Edge = tuple[int, int]


class What(StrEnum):
    """The subject of a token. Tokens of an edge are made by `stage` and used by `peer`."""

    VALUE = "value"  # forward value available to its consumer
    VALUE_OUT = "value to send"  # forward value at its producer, not yet sent
    VALUE_SENT = "sent value"
    VALUE_POSTED = "posted receive of the value"
    GRADIENT = "gradient"  # gradient available to the stage that computed the value
    GRADIENT_OUT = "gradient to send"
    GRADIENT_SENT = "sent gradient"
    GRADIENT_POSTED = "posted receive of the gradient"
    CHECKPOINT = "stage input kept for recomputation"
    ACTIVATIONS = "saved values"
    HELD = "values saved for the weight gradient"
    WEIGHTS = "gathered weights"
    ACCUMULATED = "accumulated gradients"
    REDUCED = "reduced gradients"

    __hash__ = str.__hash__  # the enum's own runs Python code, and tokens are hashed by the million


class Token(NamedTuple):
    """A fact about a stage or about the edge from `stage` to `peer`, for one microbatch or the batch."""

    what: What
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        towards = "" if self.peer is None else f" for stage {self.peer}"
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{self.what.value} of stage {self.stage}{towards}{microbatch}"


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a plain pipeline.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class TokenRules:
    """The tokens that every action of a program with these edges needs, makes and drops.

    `is_lowered`: values cross ranks by explicit sends and receives. `recomputed`, `sharded`: the stages that have any R or
    GATHER. `sends_block`: a send waits until its receive is posted (rendezvous), which is stricter than any transport.
    """

    rank_of_stage: tuple[int, ...]
    edges: tuple[Edge, ...]
    is_lowered: bool = False
    recomputed: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    sends_block: bool = False

    @classmethod
    def of(
        cls, program: Program, edges: Iterable[Edge] | None = None, *, sends_block: bool = False
    ) -> TokenRules:
        """Return the rules of `program`; `edges` defaults to the chain."""
        return cls.of_actions(program, program.placement, edges, sends_block=sends_block)

    @classmethod
    def of_actions(
        cls,
        actions: Iterable[Action],
        placement: Placement,
        edges: Iterable[Edge] | None = None,
        *,
        sends_block: bool = False,
    ) -> TokenRules:
        """Return the rules of any program that consists of `actions`, in any order and number."""
        stages: dict[Kind, set[int]] = {Kind.R: set(), Kind.GATHER: set(), Kind.REDUCE: set()}
        is_lowered = False
        for action in actions:
            is_lowered |= action.kind in TRANSFERS
            if action.kind in stages:
                stages[action.kind].add(action.stage)
        return cls(
            placement.rank_of_stage,
            _checked_edges(edges, placement.num_stages),
            is_lowered,
            recomputed=frozenset(stages[Kind.R]),
            sharded=frozenset(stages[Kind.GATHER]),
            reduced=frozenset(stages[Kind.REDUCE]),
            sends_block=sends_block,
        )

    def lowered(self) -> TokenRules:
        """Return the same rules for a program with explicit sends and receives."""
        return replace(self, is_lowered=True)

    def needs(self, action: Action) -> tuple[Token, ...]:
        """Return the tokens that must hold before `action` starts."""
        return _flat(map(self._needs, action.parts))

    def _needs(self, action: Action) -> tuple[Token, ...]:
        kind, stage, microbatch, peer = action.kind, action.stage, action.microbatch, action.peer
        match kind:
            case Kind.F:
                arrived = [self._available(Kind.F, a, stage, microbatch) for a in self.producers[stage]]
                return (*_flat(arrived), *self._weights(stage))
            case Kind.R:
                return (Token(What.CHECKPOINT, stage, microbatch), *self._weights(stage))
            case Kind.I | Kind.B:
                arrived = [self._available(Kind.B, c, stage, microbatch) for c in self.consumers[stage]]
                return (*_flat(arrived), Token(What.ACTIVATIONS, stage, microbatch), *self._weights(stage))
            case Kind.W:
                return (Token(What.HELD, stage, microbatch),)
            case Kind.SEND_F | Kind.SEND_B:
                posted = (Token(_POSTED[kind], stage, microbatch, peer),) if self.sends_block else ()
                return (Token(_OUT[kind], stage, microbatch, peer), *posted)
            case Kind.RELEASE:
                return (Token(What.WEIGHTS, stage),)
            case Kind.REDUCE:
                return (Token(What.ACCUMULATED, stage),)
            case Kind.STEP:
                return (Token(What.REDUCED if stage in self.reduced else What.ACCUMULATED, stage),)
            case _:
                return ()

    def makes(self, action: Action) -> tuple[Token, ...]:
        """Return the tokens that hold once `action` is done."""
        return _flat(map(self._makes, action.parts))

    def _makes(self, action: Action) -> tuple[Token, ...]:
        kind, stage, microbatch, peer = action.kind, action.stage, action.microbatch, action.peer
        match kind:
            case Kind.F:
                values = (self._produced(Kind.F, stage, c, microbatch) for c in self.consumers[stage])
                saved = What.CHECKPOINT if stage in self.recomputed else What.ACTIVATIONS
                return (*values, Token(saved, stage, microbatch))
            case Kind.R:
                return (Token(What.ACTIVATIONS, stage, microbatch),)
            case Kind.I | Kind.B:
                gradients = (self._produced(Kind.B, stage, a, microbatch) for a in self.producers[stage])
                if kind is Kind.I:
                    return (*gradients, Token(What.HELD, stage, microbatch))
                return (*gradients, Token(What.ACCUMULATED, stage))
            case Kind.W:
                return (Token(What.ACCUMULATED, stage),)
            case Kind.SEND_F | Kind.SEND_B:
                return (Token(_SENT[kind], stage, microbatch, peer),)
            case Kind.RECV_F | Kind.RECV_B:
                assert peer is not None
                return (Token(_POSTED[kind], peer, microbatch, stage),)
            case Kind.GATHER:
                return (Token(What.WEIGHTS, stage),)
            case Kind.REDUCE:
                return (Token(What.REDUCED, stage),)
            case _:
                return ()

    def drops(self, action: Action) -> tuple[Token, ...]:
        """Return the tokens that no longer hold once `action` is done; all are of the action's own stage."""
        dropping = (part for part in action.parts if part.kind in _DROPS)
        return tuple(Token(_DROPS[part.kind], part.stage, part.microbatch) for part in dropping)

    def crosses(self, a: int, b: int) -> bool:
        """Whether stages `a` and `b` are on different ranks."""
        return self.rank_of_stage[a] != self.rank_of_stage[b]

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """Stages whose values each stage's forward needs."""
        stages = range(len(self.rank_of_stage))
        return tuple(tuple(a for a, c in self.edges if c == stage) for stage in stages)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Stages that need each stage's value, and whose gradients that stage needs."""
        stages = range(len(self.rank_of_stage))
        return tuple(tuple(c for a, c in self.edges if a == stage) for stage in stages)

    def _weights(self, stage: int) -> tuple[Token, ...]:
        return (Token(What.WEIGHTS, stage),) if stage in self.sharded else ()

    def _produced(self, direction: Kind, stage: int, user: int, microbatch: int | None) -> Token:
        must_be_sent = self.is_lowered and self.crosses(stage, user)
        return Token((_OUT if must_be_sent else _AT_HAND)[direction], stage, microbatch, user)

    def _available(
        self, direction: Kind, maker: int, stage: int, microbatch: int | None
    ) -> tuple[Token, ...]:
        if self.is_lowered and self.crosses(maker, stage):
            whats: tuple[What, ...] = (_SENT[direction], _POSTED[direction])
        else:
            whats = (_AT_HAND[direction],)
        return tuple(Token(what, maker, microbatch, stage) for what in whats)


_AT_HAND = {Kind.F: What.VALUE, Kind.B: What.GRADIENT}
_OUT = {
    Kind.F: What.VALUE_OUT, Kind.B: What.GRADIENT_OUT,
    Kind.SEND_F: What.VALUE_OUT, Kind.SEND_B: What.GRADIENT_OUT,
}  # fmt: skip
_SENT = {
    Kind.F: What.VALUE_SENT, Kind.B: What.GRADIENT_SENT,
    Kind.SEND_F: What.VALUE_SENT, Kind.SEND_B: What.GRADIENT_SENT,
}  # fmt: skip
_POSTED = {
    Kind.F: What.VALUE_POSTED, Kind.B: What.GRADIENT_POSTED,
    Kind.SEND_F: What.VALUE_POSTED, Kind.SEND_B: What.GRADIENT_POSTED,
    Kind.RECV_F: What.VALUE_POSTED, Kind.RECV_B: What.GRADIENT_POSTED,
}  # fmt: skip
_DROPS = {
    Kind.I: What.ACTIVATIONS,
    Kind.B: What.ACTIVATIONS,
    Kind.W: What.HELD,
    Kind.R: What.CHECKPOINT,
    Kind.RELEASE: What.WEIGHTS,
    Kind.REDUCE: What.ACCUMULATED,
}


def _flat(groups: Iterable[tuple[Token, ...]]) -> tuple[Token, ...]:
    return tuple(token for group in groups for token in group)


def _checked_edges(edges: Iterable[Edge] | None, num_stages: int) -> tuple[Edge, ...]:
    if edges is None:
        return chain(num_stages)
    checked = tuple(sorted({(int(a), int(c)) for a, c in edges}))
    for a, c in checked:
        if not 0 <= a < c < num_stages:
            raise ScheduleError(
                f"edge {a} -> {c}: values flow from a lower to a higher stage of 0 to {num_stages - 1}; "
                "renumber the stages in the order of the model"
            )
    return checked
