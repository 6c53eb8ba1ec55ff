"""The engine's tables, derived from the rules of a program and the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stagewright.schedule.action import Action
from stagewright.schedule.tokens import Rules, Token, What
from stagewright.simulation.costs import StageCosts, Transfers, transfer_seconds
from stagewright.simulation.encoding import EncodedProgram
from stagewright.simulation.engine import AT_ONCE, LOCAL, POST, WHEN_POSTED, Floats, Ints, Tables
from stagewright.simulation.streams import COMPUTE_STREAM, STREAM_OF, Contention

_TRAVEL = {
    What.VALUE: AT_ONCE, What.GRADIENT: AT_ONCE,
    What.VALUE_SENT: WHEN_POSTED, What.GRADIENT_SENT: WHEN_POSTED,
    What.VALUE_POSTED: POST, What.GRADIENT_POSTED: POST,
}  # fmt: skip
_POSTED_FOR = {What.VALUE_SENT: What.VALUE_POSTED, What.GRADIENT_SENT: What.GRADIENT_POSTED}
_USED_BY_MAKER = {What.VALUE_OUT, What.GRADIENT_OUT}


@dataclass(frozen=True)
class TokenSpace:
    """How many tokens and links there are, and what has which number."""

    number: dict[Token, int]
    num_tokens: int
    num_links: int


@dataclass(frozen=True, eq=False)
class TokenTimes:
    """When every token of a simulated program was at hand."""

    rules: Rules
    space: TokenSpace
    tables: Tables
    known: Floats

    def needs(self, action: Action) -> dict[Token, float]:
        """Seconds at which each thing that `action` needs was at hand."""
        return {token: self._at(token) for token in self.rules.needs(action)}

    def _at(self, token: Token) -> float:
        slot = self.space.number[token if token.microbatch is None else token._replace(microbatch=0)]
        return float(
            self.known[self.tables.slot_base[slot] + (token.microbatch or 0) * self.tables.slot_stride[slot]]
        )


def tabulate(
    encoded: EncodedProgram,
    rules: Rules,
    costs: StageCosts,
    transfers: Transfers,
    contention: Contention,
    action_overhead_s: float,
) -> tuple[Tables, TokenSpace]:
    """The tables of `encoded`; every computation takes `action_overhead_s` longer than its cost."""
    number: dict[Token, int] = {}
    need, need_shift, need_offsets = _numbered((rules.needs(pattern) for pattern in encoded.patterns), number)
    make, make_shift, make_offsets = _numbered((rules.makes(pattern) for pattern in encoded.patterns), number)
    slots = tuple(number)
    sizes = np.array([1 if slot.microbatch is None else encoded.num_microbatches for slot in slots], np.int64)
    travel = [_travel(slot, rules) for slot in slots]
    links: dict[tuple[int, ...], int] = {}
    tables = Tables(
        need, need_shift, need_offsets, make, make_shift, make_offsets,
        seconds=np.array([_seconds(pattern, costs, action_overhead_s) for pattern in encoded.patterns],
        np.float64), stream=np.array([STREAM_OF[pattern.kind] for pattern in encoded.patterns], np.int64),
        slot_base=np.cumsum(sizes) - sizes, slot_stride=np.array([slot.microbatch is not None for slot in
        slots], np.int64), slot_travel=np.array(travel, np.int64), slot_link=np.array([_link(*pair, rules,
        contention, links) for pair in zip(slots, travel, strict=True)], np.int64),
        slot_seconds=np.array([_journey_s(*pair, transfers) for pair in zip(slots, travel, strict=True)],
        np.float64), slot_posted=np.array([_posted(slot, number) for slot in slots], np.int64),
        slot_user=np.array([_user(slot, rules) for slot in slots], np.int64),
    )  # fmt: skip
    return tables, TokenSpace(number, int(sizes.sum()), len(links))


def _numbered(groups: Iterable[tuple[Token, ...]], number: dict[Token, int]) -> tuple[Ints, Ints, Ints]:
    """The slots of all groups, their microbatches, and where each group starts; new slots are numbered."""
    slots: list[int] = []
    shifts: list[int] = []
    offsets = [0]
    for group in groups:
        for token in group:
            slot = token if token.microbatch is None else token._replace(microbatch=0)
            slots.append(number.setdefault(slot, len(number)))
            shifts.append(token.microbatch or 0)
        offsets.append(len(slots))
    return np.array(slots, np.int64), np.array(shifts, np.int64), np.array(offsets, np.int64)


def _seconds(pattern: Action, costs: StageCosts, action_overhead_s: float) -> float:
    overhead = action_overhead_s if STREAM_OF[pattern.kind] == COMPUTE_STREAM else 0.0
    return sum(costs.seconds(part.kind, part.stage) for part in pattern.parts) + overhead


def _travel(slot: Token, rules: Rules) -> int:
    crosses = slot.peer is not None and rules.crosses(slot.stage, slot.peer)
    return _TRAVEL.get(slot.what, LOCAL) if crosses else LOCAL


def _link(
    slot: Token, travel: int, rules: Rules, contention: Contention, links: dict[tuple[int, ...], int]
) -> int:
    if travel == LOCAL or slot.peer is None:
        return -1
    ends = (rules.rank_of_stage[slot.stage], rules.rank_of_stage[slot.peer])
    return links.setdefault(contention.link(*ends), len(links))


def _journey_s(slot: Token, travel: int, transfers: Transfers) -> float:
    if travel not in (AT_ONCE, WHEN_POSTED) or slot.peer is None:
        return 0.0
    return transfer_seconds(transfers, slot.stage, slot.peer)


def _posted(slot: Token, number: dict[Token, int]) -> int:
    posted = _POSTED_FOR.get(slot.what)
    return -1 if posted is None else number[slot._replace(what=posted)]


def _user(slot: Token, rules: Rules) -> int:
    at_stage = slot.stage if slot.peer is None or slot.what in _USED_BY_MAKER else slot.peer
    return rules.rank_of_stage[at_stage]
