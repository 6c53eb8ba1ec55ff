"""Cuts that take as little memory as can be: the last way in where nothing else fits, and how much is lacking."""

from __future__ import annotations

from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate, within_memory

_HALVINGS = 5
"""Amounts tried between what every rank would have if all had as much, and what is enough."""


def tightest(one: Candidate, body: RangeCosts) -> Candidate:
    """The configuration of `one`, which lacks memory, with the cuts that lack least of it: those found for the least that
    every device would need more."""
    line = one.line
    if one.excess_bytes <= 0:
        return one  # it lacks what the allocator loses, which no cuts foresee
    best, most = one, one.excess_bytes
    lacking = [line.missing_bytes([memory]) for memory in one.memories]
    least = sum(lacking) // len(lacking)  # if all had as much
    for _ in range(_HALVINGS):
        more = (least + most) // 2
        found = within_memory(one.with_headroom(one.configuration.headroom - more), body)
        if more + found.excess_bytes < most:
            best, most = found.with_headroom(one.configuration.headroom), more + found.excess_bytes
        if found.excess_bytes > 0:
            least = more
    return best
