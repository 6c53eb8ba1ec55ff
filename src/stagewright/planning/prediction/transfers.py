"""Transfers between stages: how long they are on their way, and what they take of ranks that compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, all_gather_seconds
from stagewright.graph.messages import messages
from stagewright.schedule.lanes import LANE_CTAS

if TYPE_CHECKING:
    from stagewright.planning.prediction.pipeline import Pipeline


_CTA_BYTES_PER_S = 33e9
"""Of a thread block that sends or receives over NVLink.

Source: NCCL's sends and receives between two H100, 66.1 GB/s at 8 MB and 131.5 GB/s at 64 MB with at most 4 thread blocks,
of which it uses 2 and 4 (meta-pytorch/torchcomms#2670 and #2635, May 2026). Ignores: what other devices attain.
"""

_FEW_CTAS_BYTES = 2 * 2**24
"""A message larger than this uses all thread blocks that it may, a smaller one half of them.

Source: NCCL, `addP2pToPlan`: parts of at most 32 steps of 512 KiB; what torchcomms#2635 counted."""

_NETWORK_CHANNELS = 2
"""Of a transfer to another node, a multiprocessor each. Source: NCCL, `ncclTopoGetNchannels`."""

_MULTIPROCESSORS = 132
"""Of a device whose description does not say: as an H100."""


def flight_seconds(line: Pipeline, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Seconds on the way by (source, target) stage, values one way, gradients the other: of one message after the other.

    What a sender is busy for (`posting_seconds`) is over when they begin.
    """
    found = {}
    for source, target, sent in _sent(line, edges):
        if line.job.profile.transfers != "overlapped":
            found[source, target] = 0.0  # part of what `posting_seconds` says
            continue
        on_the_way = sent if _posts(line, source) is None else 0
        found[source, target] = message_seconds(line, source, target, on_the_way) if sent else 0.0
    return found


def taken_share(line: Pipeline, pipeline_rank: int) -> float:
    """The part of a rank's multiprocessors that kernels of communication take from what it computes beside them; a processor
    has none."""
    is_cpu = line.device_of(pipeline_rank).kind == "cpu"
    return 0.0 if is_cpu else line.job.profile.waits.beside_share


def transfers_slow(line: Pipeline, flights: Mapping[tuple[int, int], float]) -> Floats:
    """By how much a forward and a backward of each stage together are slower for the transfers beside them, whose kernels
    occupy multiprocessors at either end: as many as collectives do within a node, two of its channels between nodes. On
    lanes it is the sender alone, as its receiver waits, and a lane's thread blocks within a node.

    Source: NCCL, `ncclTopoGetNchannels`, for transfers between nodes; what `taken_share` is of within one. Ignores:
    memory traffic of transfers; that a rank may have nothing to compute while they are on their way; that a send occupies
    its multiprocessors from when it is issued, though its receiver may still compute (3 % of an H100 until then).
    """
    placed = line.program.placement.rank_of_stage
    slowed = np.zeros(len(placed))
    for (source, target), seconds in flights.items():
        ends = line.first_rank(placed[source]), line.first_rank(placed[target])
        between_nodes = line.cluster.node_of(ends[0]) != line.cluster.node_of(ends[1])
        slowed_stages = (source,) if line.uses_lanes else (source, target)
        for stage in slowed_stages if placed[source] != placed[target] else ():
            share, products = taken_share(line, placed[stage]), line.device_of(placed[stage]).products
            num = products.num_multiprocessors if products else _MULTIPROCESSORS
            if between_nodes:
                share = min(share, _NETWORK_CHANNELS / num)
            elif line.uses_lanes:
                share = min(share, LANE_CTAS / num)
            slowed[stage] += seconds * share
    return slowed


def posting_seconds(line: Pipeline, edges: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    """What a forward and a backward of each stage take of their rank to send what they make, until its bytes have left, and
    to post buffers for what they need: nothing where another processor than that which computes does this, or where both
    stages are on one rank.

    Ignores: that a buffer is posted a microbatch ahead; what the system copies at the receiver's end.
    """
    placed = line.program.placement.rank_of_stage
    forward, backward = np.zeros(len(placed)), np.zeros(len(placed))
    for source, target, sent in _sent(line, edges):
        if placed[source] == placed[target]:
            continue
        busy = forward if source < target else backward
        if line.job.profile.transfers != "overlapped":
            taken = _blocking_seconds(line, source, target, sent)
            busy[source] += taken
            if line.job.profile.transfers == "sends and receives":
                busy[target] += taken
            continue
        if (overhead := _posts(line, target)) is not None:
            busy[target] += _num_messages(line, source, target) * overhead
        if (overhead := _posts(line, source)) is not None:
            leaving = message_seconds(line, source, target, sent) - message_seconds(line, source, target, 0)
            busy[source] += _num_messages(line, source, target) * overhead + leaving
    return forward, backward


def _posts(line: Pipeline, stage: int) -> float | None:
    """Seconds that a message takes of the processor that computes a stage; None where another one does that."""
    return line.device_of(line.program.placement.rank_of_stage[stage]).message_overhead_s


def _blocking_seconds(line: Pipeline, source: int, target: int, num_bytes: float) -> float:
    """For how long a rank stands still that waits for what it sends.

    Source: Megatron-LM's scatter-gather optimisation, Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
    """
    profile = line.job.profile
    if not profile.scatters_boundaries or line.tp == 1 or line.splits_sequence:
        return message_seconds(line, source, target, num_bytes) + profile.host.member_s
    placed = line.program.placement.rank_of_stage
    here, there = line.first_rank(placed[source]), line.first_rank(placed[target])
    gathered_s = all_gather_seconds(line.cluster, num_bytes, range(there, there + line.tp))
    sent_s = message_seconds(line, source, target, num_bytes / line.tp)
    between_nodes = line.cluster.node_of(here) != line.cluster.node_of(there)
    return sent_s + gathered_s + profile.host.member_s + between_nodes * profile.waits.scattered_s


def message_seconds(line: Pipeline, source: int, target: int, num_bytes: float) -> float:
    """Of one message from a stage to another, in the replica where that takes longest."""
    placed = line.program.placement.rank_of_stage
    ends = line.first_rank(placed[source]), line.first_rank(placed[target])
    width = line.num_holders * line.tp
    seconds = lane_seconds if line.uses_lanes else Cluster.blocks_seconds
    return seconds(line.cluster, num_bytes, *ends, width)


def lane_seconds(cluster: Cluster, num_bytes: float, source: int, target: int, width: int) -> float:
    """As `Cluster.blocks_seconds`, but no faster than the thread blocks of a lane copy."""
    if source == target:
        return 0.0
    num_ctas = LANE_CTAS if num_bytes > _FEW_CTAS_BYTES else LANE_CTAS / 2
    copied_s = num_bytes / (num_ctas * _CTA_BYTES_PER_S)
    latency_s = cluster.blocks_seconds(0, source, target, width)
    return max(cluster.blocks_seconds(num_bytes, source, target, width), latency_s + copied_s)


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
