"""Transfers between stages: how long they are on their way, and what they take of ranks that compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stagewright.graph.payload import messages

if TYPE_CHECKING:
    from stagewright.planning.predict import Pipeline

Floats = NDArray[np.float64]


def transfer_times(line: Pipeline, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Seconds on the way by (source, target) stage: values one way, gradients the other."""
    placed = line.program.placement.rank_of_stage
    return {
        (source, target): line.cluster.point_to_point_seconds(
            sent, line.first_rank(placed[source]), line.first_rank(placed[target])
        )
        if sent
        else 0.0
        for source, target, sent in _sent(line, edges)
    }


def posting_seconds(line: Pipeline, edges: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    """What a forward and a backward of each stage take of their rank to send what they make and to post buffers for what
    they need: nothing where another processor than that which computes does this, or where both stages are on one rank.

    Ignores: that a buffer is posted a microbatch ahead; what the system copies at the receiver's end.
    """
    placed = line.program.placement.rank_of_stage
    forward, backward = np.zeros(len(placed)), np.zeros(len(placed))
    for source, target, sent in _sent(line, edges):
        if placed[source] == placed[target]:
            continue
        num_messages = _num_messages(line, source, target)
        busy = forward if source < target else backward
        for stage in (source, target):
            each = line.device_of(placed[stage]).message_overhead_s
            if each is not None:
                busy[stage] += num_messages * each + (
                    _copying(line, source, target, sent) if stage == source else 0.0
                )
    return forward, backward


def _copying(line: Pipeline, source: int, target: int, sent: int) -> float:
    """Seconds in which a sender's bytes leave it."""
    ends = (line.first_rank(line.program.placement.rank_of_stage[stage]) for stage in (source, target))
    first, second = ends
    between = line.cluster.point_to_point_seconds
    return between(sent, first, second) - between(0, first, second)


def _sent(line: Pipeline, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) of every edge, both ways."""
    for low, high in edges:
        yield low, high, line.summaries[low].sent_bytes.get(high, 0)
        yield high, low, line.summaries[high].returned_bytes.get(low, 0)


def _num_messages(line: Pipeline, source: int, target: int) -> int:
    stage = line.stages[source]
    sent = stage.sends if source < target else stage.grad_sends
    values = next((transfer.values for transfer in sent if transfer.stage == target), ())
    return len(messages(stage.value(value) for value in values))
