"""Transfers between stages: their seconds, and the time that they cost the ranks."""

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
"""Bytes per second of a thread block that sends or receives over NVLink.

Source: NCCL's sends and receives between two H100, 66.1 GB/s at 8 MB and 131.5 GB/s at 64 MB with at most 4 thread blocks,
of which it uses 2 and 4 (meta-pytorch/torchcomms#2670 and #2635, May 2026). Ignores: what other devices attain.
"""

_FEW_CTAS_BYTES = 2 * 2**24
"""Bytes above which a message uses all its thread blocks; a smaller one uses half of them.

Source: NCCL, `addP2pToPlan`: parts of at most 32 steps of 512 KiB; what torchcomms#2635 counted."""

_NETWORK_CHANNELS = 2
"""Channels of a transfer to another node, one multiprocessor each. Source: NCCL, `ncclTopoGetNchannels`."""

_MULTIPROCESSORS = 132
"""Multiprocessors of a device whose description does not give them: those of an H100."""


def transfer_seconds(line: Pipeline, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return the point-to-point seconds by (source, target) stage, of values one way and gradients the other way; the
    messages of a transfer follow each other.

    A transfer begins after the time that its sender is busy (`posting_seconds`).
    """
    seconds = {}
    for source, target, sent in _sent(line, edges):
        if line.job.profile.transfers != "overlapped":
            seconds[source, target] = 0.0  # part of `posting_seconds`
            continue
        on_the_way = sent if _posts(line, source) is None else 0
        seconds[source, target] = message_seconds(line, source, target, on_the_way) if sent else 0.0
    return seconds


def taken_share(line: Pipeline, pipeline_rank: int) -> float:
    """Return the fraction of a rank's multiprocessors that communication kernels take from overlapped computations; 0 on a
    CPU."""
    is_cpu = line.device_of(pipeline_rank).kind == "cpu"
    return 0.0 if is_cpu else line.job.profile.waits.beside_share


def transfers_slow(line: Pipeline, transfer_s: Mapping[tuple[int, int], float]) -> Floats:
    """Return by how many seconds overlapped transfers slow a forward plus a backward of each stage.

    Their kernels occupy multiprocessors at both ends: as many as collectives do within a node, two channels between nodes.
    On lanes only the sender is slowed, as its receiver waits, and within a node only by a lane's thread blocks.

    Source: NCCL, `ncclTopoGetNchannels`, for transfers between nodes; that of `taken_share` within one. Ignores:
    memory traffic of transfers; that a rank may have nothing to compute during them; that a send occupies its
    multiprocessors from when it is issued, though its receiver may still compute (3 % of an H100 until then).
    """
    placed = line.program.placement.rank_of_stage
    slowed = np.zeros(len(placed))
    for (source, target), seconds in transfer_s.items():
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
    """Return the seconds that a forward and a backward of each stage spend on sending and on posting receive buffers.

    Sending lasts until the bytes have left. Both are 0 where a processor other than the computing one does this, and
    between stages of one rank.

    Ignores: that a buffer is posted a microbatch ahead; copies by the system at the receiver's end.
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
    """Return the seconds that a message costs the processor that computes a stage; None where another processor sends."""
    return line.device_of(line.program.placement.rank_of_stage[stage]).message_overhead_s


def _blocking_seconds(line: Pipeline, source: int, target: int, num_bytes: float) -> float:
    """Return the seconds that a rank waits for its own blocking send.

    Source: Megatron-LM's scatter-gather optimisation, Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
    """
    profile = line.job.profile
    if not profile.scatters_boundaries or line.tp == 1 or line.sequence_parallel:
        return message_seconds(line, source, target, num_bytes) + profile.host.member_s
    placed = line.program.placement.rank_of_stage
    here, there = line.first_rank(placed[source]), line.first_rank(placed[target])
    gathered_s = all_gather_seconds(line.cluster, num_bytes, range(there, there + line.tp))
    sent_s = message_seconds(line, source, target, num_bytes / line.tp)
    between_nodes = line.cluster.node_of(here) != line.cluster.node_of(there)
    return sent_s + gathered_s + profile.host.member_s + between_nodes * profile.waits.scattered_s


def message_seconds(line: Pipeline, source: int, target: int, num_bytes: float) -> float:
    """Return the seconds of one message from a stage to another, in the replica where it takes longest."""
    placed = line.program.placement.rank_of_stage
    ends = line.first_rank(placed[source]), line.first_rank(placed[target])
    seconds = lane_seconds if line.uses_lanes else Cluster.blocks_seconds
    return seconds(line.cluster, num_bytes, *ends, line.ranks_per_stage)


def lane_seconds(cluster: Cluster, num_bytes: float, source: int, target: int, width: int) -> float:
    """Return `Cluster.blocks_seconds`, limited by the speed at which the thread blocks of a lane copy."""
    if source == target:
        return 0.0
    num_ctas = LANE_CTAS if num_bytes > _FEW_CTAS_BYTES else LANE_CTAS / 2
    copied_s = num_bytes / (num_ctas * _CTA_BYTES_PER_S)
    latency_s = cluster.blocks_seconds(0, source, target, width)
    return max(cluster.blocks_seconds(num_bytes, source, target, width), latency_s + copied_s)


def _sent(line: Pipeline, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, bytes) of every edge, in both directions."""
    for low, high in edges:
        yield low, high, line.summaries[low].sent_bytes.get(high, 0)
        yield high, low, line.summaries[high].returned_bytes.get(low, 0)


def _num_messages(line: Pipeline, source: int, target: int) -> int:
    stage = line.stages[source]
    sent = stage.sends if source < target else stage.grad_sends
    values = next((transfer.values for transfer in sent if transfer.stage == target), ())
    return len(messages(stage.value(value) for value in values))
