"""Cuts that need the least memory: the last resort where nothing else fits, and the measure of how much is missing."""

from __future__ import annotations

from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate, within_memory

_HALVINGS = 5
"""Number of amounts tried between the mean excess of the ranks and an amount that suffices."""


def tightest(candidate: Candidate, body: RangeCosts) -> Candidate:
    """Return the configuration of `candidate`, which does not fit, with the cuts that are over by least: those that fit with
    the smallest addition to the memory of every device."""
    line = candidate.line
    if candidate.excess_bytes <= 0:
        return candidate  # only fragmentation exceeds the memory, which cuts cannot predict
    best, most = candidate, candidate.excess_bytes
    lacking = [line.missing_bytes([memory]) for memory in candidate.memories]
    least = sum(lacking) // len(lacking)  # as if all were over equally
    for _ in range(_HALVINGS):
        more = (least + most) // 2
        tried = within_memory(candidate.with_headroom(candidate.configuration.headroom - more), body)
        if more + tried.excess_bytes < most:
            best, most = tried.with_headroom(candidate.configuration.headroom), more + tried.excess_bytes
        if tried.excess_bytes > 0:
            least = more
    return best
