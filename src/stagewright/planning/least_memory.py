"""Cuts that take as little memory as can be: the last way in where nothing else fits, and how much is lacking."""

from __future__ import annotations

from stagewright.estimation.stages import BodyCosts
from stagewright.planning.candidate import Candidate, within_memory
from stagewright.planning.pipeline import reserved_bytes

_HALVINGS = 5
"""Limits tried between what every rank would have if all had as much, and what is enough."""


def tightest(one: Candidate, body: BodyCosts) -> Candidate:
    """The configuration of `one`, which lacks memory on devices that are all alike, with the cuts that lack least of it:
    those found for the lowest limit that is kept."""
    line = one.line
    if line.missing_bytes(one.memories) <= 0:
        return one  # it lacks what the allocator loses, which no cuts foresee
    device = line.cluster.device
    best, most = one, line.job.usable_bytes(device) + one.excess_bytes
    least = sum(reserved_bytes(memory, device) for memory in one.memories) // len(
        one.memories
    )  # if all had as much
    for _ in range(_HALVINGS):
        limit = (least + most) // 2
        limited = line.job.model_copy(update={"memory_limit": limit})
        found = within_memory(one.for_job(limited), body)
        if limit + found.excess_bytes < most:
            best, most = found.for_job(line.job), limit + found.excess_bytes
        if found.excess_bytes > 0:
            least = limit
    return best
