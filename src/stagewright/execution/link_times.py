"""Times of the messages of one microbatch between two ranks, measured between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.estimation.memory import stage_edges
from stagewright.execution.clock import moment, synchronize, undelayed_s
from stagewright.execution.collectives import exchange
from stagewright.execution.session import Session
from stagewright.execution.transport import Channel, Transport, blank_values

_TRIPS = 5
"""Round trips per pair; the first is dropped, as it includes work that the other rank still had to do."""


@dataclass(frozen=True)
class LinkTime:
    """A round trip between two global ranks: bytes of the messages there and back, and the seconds of the fastest of
    several, without those in which the first rank waited for a processor."""

    ends: tuple[int, int]
    there: tuple[int, ...]
    back: tuple[int, ...]
    seconds: float


def link_times(session: Session) -> list[LinkTime]:
    """Time the links of all pairs of ranks whose stages send to each other, one after another; every rank must call this,
    between two steps."""
    session.watch("timing links")
    measured: list[list[Any]] = []
    for there, back, is_near in _channels(session):
        seconds = [_trip(session.device, there, back, is_near) for _ in range(_TRIPS)][1:]
        if is_near:
            sizes = [[message.num_bytes for message in channel.messages] for channel in (there, back)]
            measured.append([session.mesh.rank, there.peer, *sizes, min(seconds)])
    return [
        LinkTime((near, far), tuple(sent), tuple(returned), seconds)
        for rank_times in exchange(measured)
        for near, far, sent, returned, seconds in rank_times
    ]


def _channels(session: Session) -> Iterator[tuple[Channel, Channel, bool]]:
    """Yield, for every pair of pipeline ranks with this one, in the same order on all ranks, the channels of values and of
    cotangents between two of their stages, and whether this rank sends the values."""
    placed, runner = session.plan.placement, session.runner
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    for low, high in stage_edges(session.stages):
        pair = placed[low], placed[high]
        if pair[0] != pair[1]:
            edges.setdefault((min(pair), max(pair)), (low, high))
    for pair, (low, high) in sorted(edges.items()):
        if session.mesh.pipeline_rank in pair:
            there, back = runner.channels_between(low, high)
            if there.messages and back.messages:
                yield there, back, placed[low] == session.mesh.pipeline_rank


def _trip(device: torch.device, there: Channel, back: Channel, is_near: bool) -> float:
    """Return the seconds of one round trip, as measured by the rank that sends first."""
    transport, began = Transport(device), moment()
    outward, inward = (there, back) if is_near else (back, there)
    values = blank_values(outward, device)
    transport.post(inward, _NO_MICROBATCH)
    if not is_near:
        transport.receive(inward, _NO_MICROBATCH)
    transport.send(outward, _NO_MICROBATCH, values)
    if is_near:
        transport.receive(inward, _NO_MICROBATCH)
    transport.settle_all()
    synchronize(device)
    return undelayed_s(began)


_NO_MICROBATCH = -1
"""Microbatch number that distinguishes these messages from those of a batch."""
