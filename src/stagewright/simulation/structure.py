"""The cost-independent part of a simulation: tokens of the actions, and links between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from stagewright.schedule.action import Kind
from stagewright.schedule.tokens import Edge, Token, TokenRules, What
from stagewright.simulation.costs import CHECKPOINTED_FORWARD, KIND_ROWS
from stagewright.simulation.encoding import EncodedProgram
from stagewright.simulation.engine import AT_ONCE, LOCAL, POST, WHEN_POSTED, Floats, Ints, Tables
from stagewright.simulation.streams import STREAM_OF, Contention

_TRAVEL = {
    What.VALUE: AT_ONCE,
    What.GRADIENT: AT_ONCE,
    What.VALUE_SENT: WHEN_POSTED,
    What.GRADIENT_SENT: WHEN_POSTED,
    What.VALUE_POSTED: POST,
    What.GRADIENT_POSTED: POST,
}
_POSTED_FOR = {What.VALUE_SENT: What.VALUE_POSTED, What.GRADIENT_SENT: What.GRADIENT_POSTED}
_USED_BY_MAKER = {What.VALUE_OUT, What.GRADIENT_OUT}


@dataclass(frozen=True, eq=False)
class Structure:
    """Tables of a program without seconds, and the position of each cost.

    Pattern `p` has the costs in row `row[p]`, column `stage[p]` of the cost tables; an overlapped pair, of pattern
    `pairs[i]`, also those of its second part, in row `second_row[i]`, column `second_stage[i]`. Token `s` of microbatch `m`
    has the index ``slot_base[s] + m * slot_stride[s]``. `transfers` are the slots that are sent, with source and target
    stage.
    """

    rules: TokenRules
    tables: Tables
    slots: dict[Token, int]
    transfers: tuple[tuple[int, int, int], ...]
    slot_base: Ints
    slot_stride: Ints
    row: Ints
    stage: Ints
    pairs: Ints
    second_row: Ints
    second_stage: Ints
    num_tokens: int
    num_links: int

    @cached_property
    def sent_slots(self) -> Ints:
        """Slots of all transfers."""
        return _ints(slot for slot, _, _ in self.transfers)

    def per_pattern(self, table: Floats) -> Floats:
        """Return the cost of each pattern from a table [row, stage]."""
        total = table[self.row, self.stage]
        if len(self.pairs):
            total[self.pairs] += table[self.second_row, self.second_stage]
        return total

    def token_index(self, token: Token) -> int:
        """Return the index of `token` in the engine."""
        slot = self.slots[token if token.microbatch is None else token._replace(microbatch=0)]
        return int(self.slot_base[slot] + (token.microbatch or 0) * self.slot_stride[slot])


# A search simulates one program under many costs; the entries go when their programs do.
_STRUCTURES: WeakKeyDictionary[EncodedProgram, dict[object, Structure]] = WeakKeyDictionary()


def structure_of(encoded: EncodedProgram, edges: Iterable[Edge] | None, contention: Contention) -> Structure:
    """Return the structure of `encoded`, built once per edges and contention."""
    edges = None if edges is None else tuple(edges)
    structures = _STRUCTURES.setdefault(encoded, {})
    key = (edges, contention)
    if key not in structures:
        rules = TokenRules.of_actions(encoded.patterns, encoded.placement, edges)
        structures[key] = _build(encoded, rules, contention)
    return structures[key]


def _build(encoded: EncodedProgram, rules: TokenRules, contention: Contention) -> Structure:
    slots: dict[Token, int] = {}
    needs = _numbered((rules.needs(pattern) for pattern in encoded.patterns), slots)
    makes = _numbered((rules.makes(pattern) for pattern in encoded.patterns), slots)
    sizes = _ints(1 if slot.microbatch is None else encoded.num_microbatches for slot in slots)
    base, stride = np.cumsum(sizes) - sizes, _ints(slot.microbatch is not None for slot in slots)
    travel = _ints(_travel(slot, rules) for slot in slots)
    posted = _ints(_posted(slot, slots) for slot in slots)
    links: dict[tuple[int, ...], int] = {}
    tables = Tables(
        need_first=base[needs.slot] + needs.shift * stride[needs.slot],
        need_step=stride[needs.slot],
        need_offsets=needs.offsets,
        make_first=base[makes.slot] + makes.shift * stride[makes.slot],
        make_step=stride[makes.slot],
        make_posted=base[posted[makes.slot]] + makes.shift,
        make_slot=makes.slot,
        make_travel=travel[makes.slot],
        make_offsets=makes.offsets,
        seconds=np.zeros(len(encoded.patterns)),
        stream=_ints(STREAM_OF[pattern.kind] for pattern in encoded.patterns),
        slot_link=_ints(_link(slot, rules, contention, links) for slot in slots),
        slot_seconds=np.zeros(len(slots)),
        slot_user=_ints(_user(slot, rules) for slot in slots),
    )
    second_parts = [pattern.parts[1] for pattern in encoded.patterns if pattern.overlapped]
    return Structure(
        rules,
        tables,
        slots,
        tuple(
            (index, slot.stage, slot.peer)
            for slot, index in slots.items()
            if slot.peer is not None and travel[index] in (AT_ONCE, WHEN_POSTED)
        ),
        base,
        stride,
        row=_ints(_row(pattern.kind, pattern.stage in rules.recomputed) for pattern in encoded.patterns),
        stage=_ints(pattern.stage for pattern in encoded.patterns),
        pairs=_ints(index for index, pattern in enumerate(encoded.patterns) if pattern.overlapped),
        second_row=_ints(_row(part.kind, part.stage in rules.recomputed) for part in second_parts),
        second_stage=_ints(part.stage for part in second_parts),
        num_tokens=int(sizes.sum()),
        num_links=len(links),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.array([*values], np.int64)


def _row(kind: Kind, is_recomputed: bool) -> int:
    return CHECKPOINTED_FORWARD if kind is Kind.F and is_recomputed else KIND_ROWS[kind]


class _Numbered(NamedTuple):
    """The slots of all groups of tokens, their microbatches, and the start of each group."""

    slot: Ints
    shift: Ints
    offsets: Ints


def _numbered(groups: Iterable[tuple[Token, ...]], slots: dict[Token, int]) -> _Numbered:
    """Return `groups` as arrays; add new slots to `slots`."""
    numbers: list[int] = []
    shifts: list[int] = []
    offsets = [0]
    for group in groups:
        for token in group:
            slot = token if token.microbatch is None else token._replace(microbatch=0)
            numbers.append(slots.setdefault(slot, len(slots)))
            shifts.append(token.microbatch or 0)
        offsets.append(len(numbers))
    return _Numbered(_ints(numbers), _ints(shifts), _ints(offsets))


def _travel(slot: Token, rules: TokenRules) -> int:
    crosses = slot.peer is not None and rules.crosses(slot.stage, slot.peer)
    return _TRAVEL.get(slot.what, LOCAL) if crosses else LOCAL


def _link(slot: Token, rules: TokenRules, contention: Contention, links: dict[tuple[int, ...], int]) -> int:
    if slot.peer is None or _travel(slot, rules) == LOCAL:
        return -1
    ends = (rules.rank_of_stage[slot.stage], rules.rank_of_stage[slot.peer])
    return links.setdefault(contention.link(*ends), len(links))


def _posted(slot: Token, slots: dict[Token, int]) -> int:
    posted = _POSTED_FOR.get(slot.what)
    return -1 if posted is None else slots[slot._replace(what=posted)]


def _user(slot: Token, rules: TokenRules) -> int:
    at_stage = slot.stage if slot.peer is None or slot.what in _USED_BY_MAKER else slot.peer
    return rules.rank_of_stage[at_stage]
