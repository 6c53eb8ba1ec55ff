"""Concurrency in the simulation: the streams of a rank and the links between ranks."""

from __future__ import annotations

from enum import Enum

from stagewright.schedule.action import COMPUTE, TRANSFERS, Kind

POST = -1
"""Stream of actions that only post a transfer, which take no time on their rank."""

COMPUTE_STREAM, COLLECTIVE_STREAM = range(2)
NUM_STREAMS = 2

STREAM_OF: dict[Kind, int] = {
    **dict.fromkeys(COMPUTE | {Kind.STEP}, COMPUTE_STREAM),
    **dict.fromkeys((Kind.GATHER, Kind.REDUCE), COLLECTIVE_STREAM),
    **dict.fromkeys(TRANSFERS | {Kind.RELEASE}, POST),
}
"""The stream on which a kind of action runs. Other streams than compute start an action no earlier than the rank's
computations have reached it in program order, and do not delay later computations."""


class Contention(Enum):
    """Which transfers wait for each other: none, those of one ordered pair of ranks, or all that one rank sends.

    Ignores: contention at the receiver and between ranks of one node.
    """

    NONE = "none"
    PAIR = "pair"
    SENDER = "sender"

    def link(self, source: int, target: int) -> tuple[int, ...]:
        """Return the key of the link from rank `source` to rank `target`."""
        return (source,) if self is Contention.SENDER else (source, target)
